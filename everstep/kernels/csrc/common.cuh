// What several kernels need: sums over a warp and over a block, in a fixed order.
#ifndef EVERSTEP_COMMON_CUH
#define EVERSTEP_COMMON_CUH

#include "wire.h"

#define WARP 32
#define WARPS (THREADS / WARP)
#define THREADS 256  // in every block, unless a kernel says otherwise
#define ALL 0xffffffffu

// Every lane gets the sum, the same bits in each.
template <class T> __device__ __forceinline__ T warp_sum(T value) {
  for (int apart = WARP / 2; apart; apart /= 2) value += __shfl_xor_sync(ALL, value, apart);
  return value;
}

// Every thread of a block of THREADS gets the sum. `shared` has WARPS elements and may be used again at once.
template <class T> __device__ __forceinline__ T block_sum(T value, T *shared) {
  value = warp_sum(value);
  __syncthreads();  // whoever still reads an earlier sum has read it
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = value;
  __syncthreads();
  T sum = 0;
  for (int warp = 0; warp < WARPS; warp++) sum += shared[warp];
  return sum;
}

// The sum of the values of the lanes up to and including this one.
__device__ __forceinline__ uint32_t warp_scan(uint32_t value) {
  int lane = (int)(threadIdx.x % WARP);
  for (int apart = 1; apart < WARP; apart *= 2) {
    uint32_t below = __shfl_up_sync(ALL, value, apart);
    if (lane >= apart) value += below;
  }
  return value;
}

// The sum of the values of the threads before this one; the sum of all goes to `total`. `shared` as in block_sum.
__device__ __forceinline__ uint32_t block_scan(uint32_t value, uint32_t *shared, uint32_t *total) {
  uint32_t upto = warp_scan(value), before = 0, sum = 0;
  __syncthreads();
  if (threadIdx.x % WARP == WARP - 1) shared[threadIdx.x / WARP] = upto;
  __syncthreads();
  for (int warp = 0; warp < WARPS; warp++) {
    if (warp == (int)(threadIdx.x / WARP)) before = sum;
    sum += shared[warp];
  }
  *total = sum;
  return before + upto - value;
}

#endif
