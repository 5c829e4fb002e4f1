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

#endif
