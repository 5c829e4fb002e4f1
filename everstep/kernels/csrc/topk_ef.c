// Exact top-k with error feedback: one pass that accumulates and collects candidates, then a selection among those.
//
// `lower` is a key below which nothing is collected. Whenever the room for candidates is full they are cut to the best
// k, and `lower` becomes the k-th key + 1: the k-th of a part is never above the k-th of all, and a later equal loses to
// an earlier one. So no bound is too low; one that was too high leaves fewer than k, and the pass is made again with 0.
#include <stdint.h>
#include <string.h>

#include "cpu.h"
#include "wire.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX512
#endif

#define CHUNK 4096  // accumulated, then filtered while it is in the first cache
#define AHEAD 16    // elements of scratch past its room: they are written before it is known whether they stay
#define GROUP 64    // looked at one by one only if its largest key is not below the bound

// What was collected, in ascending order of index.
typedef struct Candidates {
  int32_t *indices;
  float *values;
  int64_t count, room;
  int finite;
  void (*filter)(const float *x, int64_t first, int64_t n, uint32_t lower, struct Candidates *to);
} Candidates;

CLONES static void accumulate(const float *restrict gradient, const float *restrict residual, float *restrict out,
                              int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = residual[i] + gradient[i];
}

CLONES static void accumulate_in_place(const float *restrict gradient, float *restrict out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] += gradient[i];
}

// The largest |x| as an integer, the not finite included.
static inline uint32_t largest(const float *restrict x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

CLONES static void filter(const float *restrict x, int64_t first, int64_t n, uint32_t lower, Candidates *to) {
  for (int64_t begin = 0; begin < n; begin += GROUP) {
    int64_t end = begin + GROUP < n ? begin + GROUP : n;
    uint32_t most = largest(x + begin, end - begin);
    if (most >= KEY_INF) to->finite = 0;
    if (most < lower) continue;
    for (int64_t i = begin; i < end; i++) {
      to->indices[to->count] = (int32_t)(first + i);
      to->values[to->count] = x[i];
      to->count += magnitude_key(x[i]) >= lower;
    }
  }
}

#ifdef AVX512
// The same, sixteen at a time: half the time, as a compressing store needs no branch an element.
__attribute__((target("avx512f"))) static void filter_avx512(const float *x, int64_t first, int64_t n, uint32_t lower,
                                                             Candidates *to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinite = _mm512_set1_epi32(KEY_INF);
  const __m512i least = _mm512_set1_epi32((int)lower), step = _mm512_set1_epi32(16);
  __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  places = _mm512_add_epi32(places, _mm512_set1_epi32((int)first));
  for (int64_t i = 0; i < n; i += 16, places = _mm512_add_epi32(places, step)) {
    __mmask16 there = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : 0xffff;
    __m512i value = _mm512_maskz_loadu_epi32(there, x + i), size = _mm512_and_si512(value, magnitude);
    __mmask16 finite = _mm512_cmplt_epu32_mask(size, infinite);
    __mmask16 chosen = _mm512_mask_cmpge_epu32_mask(there, _mm512_maskz_mov_epi32(finite, size), least);
    if (finite != 0xffff) to->finite = 0;
    _mm512_storeu_si512(to->indices + to->count, _mm512_maskz_compress_epi32(chosen, places));
    _mm512_storeu_si512(to->values + to->count, _mm512_maskz_compress_epi32(chosen, value));
    to->count += __builtin_popcount(chosen);
  }
}
#endif

// The k-th largest key, by digits of 11, 10 and 10 bits; `*equal` gets how many of that key are among the best k.
static uint32_t kth_key(const float *values, int64_t count, int64_t k, int64_t *equal) {
  static const int shift[3] = {20, 10, 0}, bins[3] = {2048, 1024, 1024};
  uint32_t prefix = 0, known = 0;
  for (int digit = 0; digit < 3; digit++) {
    uint32_t histogram[2048] = {0}, last = (uint32_t)bins[digit] - 1, bin = last;
    for (int64_t j = 0; j < count; j++) {
      uint32_t key = magnitude_key(values[j]);
      histogram[key >> shift[digit] & last] += (key & known) == prefix;
    }
    while (histogram[bin] < k) k -= histogram[bin--];
    prefix |= bin << shift[digit];
    known |= last << shift[digit];
  }
  *equal = k;
  return prefix;
}

// Keeps the best k, the lowest index among equals; returns the k-th key.
static uint32_t cut(Candidates *of, int64_t k) {
  int64_t equal, kept = 0;
  uint32_t kth = kth_key(of->values, of->count, k, &equal);
  for (int64_t j = 0; j < of->count; j++) {
    uint32_t key = magnitude_key(of->values[j]);
    int tie = key == kth && equal > 0;
    equal -= tie;
    of->indices[kept] = of->indices[j];
    of->values[kept] = of->values[j];
    kept += tie || key > kth;
  }
  of->count = kept;
  return kth;
}

// One pass. Without a residual, `out` is not written and the gradient is what is filtered.
static void collect(const float *gradient, const float *residual, float *out, int64_t n, int64_t k, uint32_t lower,
                    Candidates *to) {
  const float *accumulated = residual ? out : gradient;
  to->count = 0;
  to->finite = 1;
  for (int64_t first = 0; first < n; first += CHUNK) {
    int64_t size = first + CHUNK < n ? CHUNK : n - first;
    if (residual && residual == out)
      accumulate_in_place(gradient + first, out + first, size);
    else if (residual)
      accumulate(gradient + first, residual + first, out + first, size);
    if (to->count + size > to->room) lower = cut(to, k) + 1;
    to->filter(accumulated + first, first, size, lower, to);
  }
}

int64_t everstep_topk_ef_room(int64_t n, int64_t k) {
  int64_t most = 2 * k + 65536;
  return (most < n ? most : n) + AHEAD;
}

// `indices` and `values` have k elements, the scratch everstep_topk_ef_room(n, k); `out` may be `residual`; 0 <= k <= n.
// `bound` (or NULL) holds the k-th magnitude of the step before, 0 or NaN if none is known, and gets this one's.
void everstep_topk_ef(const float *gradient, const float *residual, float *out, int64_t n, int64_t k, int32_t *indices,
                      float *values, float *bound, int32_t *scratch_indices, float *scratch_values) {
  Candidates found = {scratch_indices, scratch_values, 0, everstep_topk_ef_room(n, k) - AHEAD, 1, filter};
#ifdef AVX512
  if (__builtin_cpu_supports("avx512f")) found.filter = filter_avx512;
#endif
  uint32_t lower = bound ? magnitude_key(0.95f * *bound) : 0, least = k ? KEY_INF : 0;
  collect(gradient, residual, out, n, k, lower, &found);
  if (found.count < k) collect(residual ? out : gradient, 0, 0, n, k, 0, &found);
  if (found.count > k) cut(&found, k);
  for (int64_t j = 0; j < k; j++) {
    uint32_t key = magnitude_key(found.values[j]);
    int finite = (bits_of(found.values[j]) & 0x7fffffffu) < KEY_INF;
    indices[j] = found.indices[j];
    values[j] = finite ? found.values[j] : 0.0f;
    if (out && finite) out[found.indices[j]] = 0.0f;
    least = key < least ? key : least;
  }
  if (bound) *bound = found.finite ? float_of(least) : float_of(0x7fc00000u);
}
