// What CPU and GPU must agree on to the bit: included by the C files and by the CUDA files alike.
// No multiply-add may be contracted where this is used (-ffp-contract=off, --fmad=false).
#ifndef EVERSTEP_WIRE_H
#define EVERSTEP_WIRE_H

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#endif

#ifdef __CUDACC__
#define WIRE __device__ __forceinline__
#else
#define WIRE static inline
#endif

#define KEY_INF 0x7f800000u

// The bits of a float, and back.
WIRE uint32_t bits_of(float value) {
#if defined(__CUDACC__)
  return (uint32_t)__float_as_int(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
#endif
}

WIRE float float_of(uint32_t bits) {
#if defined(__CUDACC__)
  return __int_as_float((int)bits);
#else
  float value;
  memcpy(&value, &bits, 4);
  return value;
#endif
}

// Order of magnitudes as integers: |x| without its sign; what is not finite counts as zero (it is never chosen first).
WIRE uint32_t magnitude_key(float value) {
  uint32_t key = bits_of(value) & 0x7fffffffu;
  return key < KEY_INF ? key : 0u;
}

// The scale of a block whose largest magnitude has these bits: NaN where that is not finite. Levels: 127 or 7.
WIRE float quantise_scale(uint32_t largest, float levels) {
  return largest < KEY_INF ? float_of(largest) * (1.0f / levels) : float_of(0x7fc00000u);
}

// The code of an element of a block with this scale, which is above 0: half to even.
WIRE float quantise_code(float value, float scale, float levels) {
  float code = rintf(value / scale);
  code = code > levels ? levels : code;  // the scale was rounded, most of all a subnormal one
  return code < -levels ? -levels : code;
}

#endif
