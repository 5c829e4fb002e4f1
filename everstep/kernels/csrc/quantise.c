// Blocks of 256 elements as int8, or of 64 as int4, with one fp32 scale each; the formulas stand in wire.h.
#include <stdint.h>

#include "cpu.h"
#include "wire.h"

#define BLOCK8 256
#define BLOCK4 64

// The largest |x| as an integer, the not finite included.
static inline uint32_t largest(const float *restrict x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

// Returns the block's scale; all codes are 0 where that is 0 or NaN.
static inline float quantise_block(const float *restrict x, int8_t *restrict codes, int64_t n, float levels) {
  float scale = quantise_scale(largest(x, n), levels);
  if (scale > 0.0f)
    for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)quantise_code(x[i], scale, levels);
  else
    for (int64_t i = 0; i < n; i++) codes[i] = 0;
  return scale;
}

CLONES void everstep_quantise8(const float *restrict x, int64_t n, int8_t *restrict codes, float *restrict scales) {
  int64_t block = 0;
  for (; (block + 1) * BLOCK8 <= n; block++)
    scales[block] = quantise_block(x + block * BLOCK8, codes + block * BLOCK8, BLOCK8, 127.0f);
  if (block * BLOCK8 < n)
    scales[block] = quantise_block(x + block * BLOCK8, codes + block * BLOCK8, n - block * BLOCK8, 127.0f);
}

// Two codes a byte, the first in the low half, 8 added to each; the last byte's other half is 8 if n is odd.
CLONES void everstep_quantise4(const float *restrict x, int64_t n, uint8_t *restrict codes, float *restrict scales) {
  for (int64_t begin = 0; begin < n; begin += BLOCK4) {
    int8_t plain[BLOCK4] = {0};
    int64_t size = n - begin < BLOCK4 ? n - begin : BLOCK4;
    scales[begin / BLOCK4] = size == BLOCK4 ? quantise_block(x + begin, plain, BLOCK4, 7.0f)
                                            : quantise_block(x + begin, plain, size, 7.0f);
    for (int64_t i = 0; i < (size + 1) / 2; i++)
      codes[begin / 2 + i] = (uint8_t)((plain[2 * i] + 8) | (plain[2 * i + 1] + 8) << 4);
  }
}

CLONES void everstep_dequantise8(const int8_t *restrict codes, const float *restrict scales, int64_t n,
                                 float *restrict x) {
  for (int64_t begin = 0; begin < n; begin += BLOCK8) {
    int64_t end = begin + BLOCK8 < n ? begin + BLOCK8 : n;
    float scale = scales[begin / BLOCK8];
    for (int64_t i = begin; i < end; i++) x[i] = (float)codes[i] * scale;
  }
}

CLONES void everstep_dequantise4(const uint8_t *restrict codes, const float *restrict scales, int64_t n,
                                 float *restrict x) {
  for (int64_t begin = 0; begin < n; begin += BLOCK4) {
    int64_t end = begin + BLOCK4 < n ? begin + BLOCK4 : n;
    float scale = scales[begin / BLOCK4];
    for (int64_t i = begin / 2; i < end / 2; i++) {
      x[2 * i] = (float)((codes[i] & 15) - 8) * scale;
      x[2 * i + 1] = (float)((codes[i] >> 4) - 8) * scale;
    }
    if (end % 2) x[end - 1] = (float)((codes[end / 2] & 15) - 8) * scale;
  }
}
