// Adding up sparse rows in their order, one range of places after another, so that a range stays in the cache.
//
// A place's sum is 0.0 + the rows' values in the order of the rows: the same bits as adding row after row.
// `cursors` has one element a row. Functions return -1 where a row is not ascending or a place is not in [0, n).
#include <stdint.h>
#include <string.h>

#include "cpu.h"
#include "wire.h"

#define RANGE 65536

typedef struct {
  const int32_t *indices;
  const float *values;
  int64_t rows, k;  // k elements a row
  int64_t *cursors;
} Rows;

// Adds to sums[0 ... size) what the rows have at begin ... begin + size, and sets those places' bits if there are any.
static int add_range(const Rows *of, int64_t begin, int64_t size, float *sums, uint64_t *bits) {
  for (int64_t row = 0; row < of->rows; row++) {
    const int32_t *indices = of->indices + row * of->k;
    const float *values = of->values + row * of->k;
    int64_t j = of->cursors[row];
    for (; j < of->k && indices[j] < begin + size; j++) {
      int64_t at = indices[j] - begin;
      if (at < 0) return -1;
      sums[at] += values[j];
      if (bits) bits[at >> 6] |= (uint64_t)1 << (at & 63);
    }
    of->cursors[row] = j;
  }
  return 0;
}

static int all_added(const Rows *rows) {
  for (int64_t row = 0; row < rows->rows; row++)
    if (rows->cursors[row] < rows->k) return 0;
  return 1;
}

CLONES static void multiply(float *x, int64_t n, float by) {
  for (int64_t i = 0; i < n; i++) x[i] *= by;
}

int everstep_merge_dense(const int32_t *indices, const float *values, int64_t rows, int64_t k, int64_t n, float scale,
                         float *out, int64_t *cursors) {
  Rows of = {indices, values, rows, k, cursors};
  memset(cursors, 0, (size_t)rows * sizeof *cursors);
  for (int64_t begin = 0; begin < n; begin += RANGE) {
    int64_t size = n - begin < RANGE ? n - begin : RANGE;
    memset(out + begin, 0, (size_t)size * sizeof *out);
    if (add_range(&of, begin, size, out + begin, 0)) return -1;
    if (scale != 1.0f) multiply(out + begin, size, scale);
  }
  return all_added(&of) ? 0 : -1;
}

// Writes the sums at the places whose bits are set, and leaves both as zeros; returns how many.
static int64_t take(int64_t begin, float *sums, uint64_t *bits, int32_t *indices, float *values) {
  int64_t count = 0;
  for (int64_t word = 0; word < RANGE / 64; word++) {
    for (uint64_t left = bits[word]; left; left &= left - 1, count++) {
      int64_t at = word * 64 + __builtin_ctzll(left);
      indices[count] = (int32_t)(begin + at);
      values[count] = sums[at];
      sums[at] = 0.0f;
    }
    bits[word] = 0;
  }
  return count;
}

// `to_indices` and `to_values` have min(rows * k, n) elements, `sums` RANGE and `bits` RANGE / 64, all zero.
// Returns how many places there are.
int64_t everstep_merge(const int32_t *indices, const float *values, int64_t rows, int64_t k, int64_t n,
                       int32_t *to_indices, float *to_values, float *sums, uint64_t *bits, int64_t *cursors) {
  Rows of = {indices, values, rows, k, cursors};
  int64_t count = 0;
  memset(cursors, 0, (size_t)rows * sizeof *cursors);
  for (int64_t begin = 0; begin < n; begin += RANGE) {
    int64_t size = n - begin < RANGE ? n - begin : RANGE;
    if (add_range(&of, begin, size, sums, bits)) return -1;
    count += take(begin, sums, bits, to_indices + count, to_values + count);
  }
  return all_added(&of) ? count : -1;
}

int64_t everstep_merge_range(void) { return RANGE; }
