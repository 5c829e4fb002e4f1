// Eva: c = b^T G a / (damping + |a|^2 |b|^2), then G <- (G - c b a^T) / damping; many layers in each launch.
#include "common.cuh"

#define TILE (1 << 14)  // as in eva.py

struct Layer {
  uint64_t gradient, a, b;  // addresses
  int64_t m, n, first, count, unused;  // its tiles are those from `first` on
};

struct Tile {
  int32_t layer, index;
};

// Walks through a tile in steps of WIDTH elements (n is a multiple): each thread takes every THREADS-th. The row and
// the column are kept up by adding, for a division each step would cost more than the step.
template <int WIDTH>
struct Walk {
  int64_t at, end;  // in the flat matrix, in units of WIDTH
  int row, column, rows_on, columns_on, columns;

  __device__ Walk(const Layer &layer, int tile) {
    columns = (int)(layer.n / WIDTH);
    at = (int64_t)tile * (TILE / WIDTH) + threadIdx.x;
    end = min((int64_t)(tile + 1) * (TILE / WIDTH), layer.m * columns);
    row = (int)(at / columns);
    column = (int)(at - (int64_t)row * columns);
    rows_on = THREADS / columns;
    columns_on = THREADS % columns;
  }

  __device__ void next() {
    at += THREADS;
    row += rows_on;
    column += columns_on;
    if (column >= columns) {
      column -= columns;
      row++;
    }
  }
};

__device__ __forceinline__ bool in_fours(const Layer &layer) {
  return ((layer.gradient | layer.a) % 16 | (uint64_t)layer.n % 4) == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    eva_dot(const Layer *__restrict__ layers, const Tile *__restrict__ tiles, float *__restrict__ partial) {
  __shared__ float shared[WARPS];
  const Tile tile = tiles[blockIdx.x];
  const Layer layer = layers[tile.layer];
  const float *__restrict__ b = (const float *)layer.b;
  float sum = 0.0f;
  if (in_fours(layer)) {
    const float4 *__restrict__ g = (const float4 *)layer.gradient, *__restrict__ a = (const float4 *)layer.a;
    for (Walk<4> walk(layer, tile.index); walk.at < walk.end; walk.next()) {
      float4 x = g[walk.at], y = a[walk.column];
      sum += b[walk.row] * ((x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w));
    }
  } else {
    const float *__restrict__ g = (const float *)layer.gradient, *__restrict__ a = (const float *)layer.a;
    for (Walk<1> walk(layer, tile.index); walk.at < walk.end; walk.next())
      sum += b[walk.row] * (g[walk.at] * a[walk.column]);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// A block for each layer. In float64, as there is little of it.
extern "C" __global__ void __launch_bounds__(THREADS)
    eva_coefficient(const Layer *__restrict__ layers, const float *__restrict__ partial,
                    float *__restrict__ coefficient, double damping) {
  __shared__ double shared[WARPS];
  const Layer layer = layers[blockIdx.x];
  const float *a = (const float *)layer.a, *b = (const float *)layer.b;
  double dot = 0.0, a2 = 0.0, b2 = 0.0;
  for (int64_t i = threadIdx.x; i < layer.count; i += THREADS) dot += partial[layer.first + i];
  for (int64_t i = threadIdx.x; i < layer.n; i += THREADS) a2 += (double)a[i] * a[i];
  for (int64_t i = threadIdx.x; i < layer.m; i += THREADS) b2 += (double)b[i] * b[i];
  dot = block_sum(dot, shared);
  a2 = block_sum(a2, shared);
  b2 = block_sum(b2, shared);
  if (threadIdx.x == 0) coefficient[blockIdx.x] = (float)(dot / (damping + a2 * b2));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    eva_apply(const Layer *__restrict__ layers, const Tile *__restrict__ tiles, const float *__restrict__ coefficient,
              float inverse_damping) {
  const Tile tile = tiles[blockIdx.x];
  const Layer layer = layers[tile.layer];
  const float *__restrict__ b = (const float *)layer.b;
  const float c = coefficient[tile.layer];
  if (in_fours(layer)) {
    float4 *g = (float4 *)layer.gradient;
    const float4 *__restrict__ a = (const float4 *)layer.a;
    for (Walk<4> walk(layer, tile.index); walk.at < walk.end; walk.next()) {
      float4 x = g[walk.at], y = a[walk.column];
      const float cb = c * b[walk.row];
      x.x = (x.x - cb * y.x) * inverse_damping;
      x.y = (x.y - cb * y.y) * inverse_damping;
      x.z = (x.z - cb * y.z) * inverse_damping;
      x.w = (x.w - cb * y.w) * inverse_damping;
      g[walk.at] = x;
    }
  } else {
    float *g = (float *)layer.gradient;
    const float *__restrict__ a = (const float *)layer.a;
    for (Walk<1> walk(layer, tile.index); walk.at < walk.end; walk.next())
      g[walk.at] = (g[walk.at] - c * b[walk.row] * a[walk.column]) * inverse_damping;
  }
}
