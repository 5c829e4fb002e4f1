// Elias-Fano codes of ascending indices: the low bits packed, then a bit vector with one 1 for each of the others.
#include <stdint.h>
#include <string.h>

#include "wire.h"

// Eight bytes, the first lowest, on any machine (compilers make one load and one store of these).
static inline uint64_t load(const uint8_t *at) {
  uint64_t word = 0;
  for (int i = 0; i < 8; i++) word |= (uint64_t)at[i] << 8 * i;
  return word;
}

static inline void store(uint8_t *at, uint64_t word) {
  for (int i = 0; i < 8; i++) at[i] = (uint8_t)(word >> 8 * i);
}

// As `load`, with zeros in place of what lies at or behind `end`.
static inline uint64_t load_upto(const uint8_t *at, const uint8_t *end) {
  if (end - at >= 8) return load(at);
  uint64_t word = 0;
  for (int i = 0; i < end - at; i++) word |= (uint64_t)at[i] << 8 * i;
  return word;
}

static void pack_low(const int32_t *indices, int64_t k, int r, uint8_t *to) {
  uint64_t word = 0, mask = ((uint64_t)1 << r) - 1;
  int held = 0;
  for (int64_t j = 0; j < k; j++) {
    uint64_t low = (uint64_t)indices[j] & mask;
    word |= low << held;
    held += r;
    if (held < 64) continue;
    store(to, word);
    to += 8;
    held -= 64;
    word = held ? low >> (r - held) : 0;
  }
  for (; held > 0; held -= 8, word >>= 8) *to++ = (uint8_t)word;
}

// `packed` has packed_size(k, n) = m bytes. Returns 0, or 1 where an index is not above the last or not below n.
int everstep_pack(const int32_t *indices, int64_t k, int64_t n, int r, uint8_t *packed, int64_t m) {
  uint8_t *low = packed + 1, *high = low + (k * r + 7) / 8;
  int64_t last = -1;
  packed[0] = (uint8_t)r;
  memset(high, 0, (size_t)(packed + m - high));
  for (int64_t j = 0; j < k; j++) {
    if (indices[j] <= last || indices[j] >= n) return 1;
    last = indices[j];
    int64_t at = (last >> r) + j;
    high[at >> 3] |= (uint8_t)(1 << (at & 7));
  }
  pack_low(indices, k, r, low);
  return 0;
}

// Reads whatever `packed` holds. Returns 0, or 1 where it is no code of k ascending indices below 2^31.
int everstep_unpack(const uint8_t *packed, int64_t m, int64_t k, int32_t *indices) {
  if (m < 1 || packed[0] > 30) return 1;
  int r = packed[0];
  const uint8_t *low = packed + 1, *end = packed + m;
  if ((m - 1) * 8 < k * r) return 1;
  const uint8_t *high = low + (k * r + 7) / 8;
  uint64_t mask = ((uint64_t)1 << r) - 1;
  int64_t size = end - high, j = 0, last = -1;
  for (int64_t at = 0; at < size; at += 8) {
    for (uint64_t word = load_upto(high + at, end); word; word &= word - 1, j++) {
      if (j == k) return 1;
      int64_t upper = at * 8 + __builtin_ctzll(word) - j;
      if (upper > INT32_MAX >> r) return 1;
      int64_t index = upper << r | (int64_t)(load_upto(low + (j * r >> 3), end) >> (j * r & 7) & mask);
      if (index <= last) return 1;
      indices[j] = (int32_t)(last = index);
    }
  }
  return j < k;
}
