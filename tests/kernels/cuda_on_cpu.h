// Tests only: runs a CUDA source on the CPU, one fibre per CUDA thread, one block after another.
//
// A thread runs until it meets the others (__syncthreads, shuffle, ballot, ...); who runs next is a seeded choice, and
// a warp may run far ahead of the rest, as on a GPU. So a missing barrier shows as a wrong or moving result. What a GPU
// leaves undefined is refused, with the place: a collective that not all threads reach, a mask that is not full, a
// misaligned vector, an index past the end of an array, a shift too far. Shared memory is poisoned before each block.
// Not shown here: memory ordering between blocks, the last bits of log2f, expf, sinf, ... on a GPU, speed.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// In a section of its own, to be found and poisoned; "used" keeps the compiler from caching it across a barrier.
#define __shared__ static __attribute__((section("shared_memory"), used))
#define __constant__ static

struct uint3 { unsigned x, y, z; };
#define SHIM_VECTOR(T, name, bytes2, bytes4)                                                                     \
  struct alignas(bytes2) name##2 { T x, y; };                                                                    \
  struct alignas(bytes4) name##4 { T x, y, z, w; };                                                              \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                              \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTOR(signed char, char, 2, 4)
SHIM_VECTOR(unsigned char, uchar, 2, 4)
SHIM_VECTOR(short, short, 4, 8)
SHIM_VECTOR(unsigned short, ushort, 4, 8)
SHIM_VECTOR(int, int, 8, 16)
SHIM_VECTOR(unsigned, uint, 8, 16)
SHIM_VECTOR(float, float, 8, 16)
SHIM_VECTOR(long long, longlong, 16, 16)
SHIM_VECTOR(unsigned long long, ulonglong, 16, 16)
SHIM_VECTOR(double, double, 16, 16)

static uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace shim {

const unsigned MOST = 1024;  // threads in a block
const size_t STACK = 1 << 16;
enum State : unsigned char { READY, IN_WARP, AT_BARRIER, DONE };

struct Fibre {
  ucontext_t start;
  jmp_buf where;
  char *stack;
  bool begun;
};

static Fibre fibres[MOST];
static unsigned char states[MOST];
static unsigned threads, current, at_barrier, in_warp[MOST / 32];
static int meeting_in[MOST / 32];      // which collective a warp's lanes meet in
static uint64_t slots[2][MOST];        // what each lane gave; two, since it may reach the next collective ...
static unsigned char parities[MOST];   // ... before another has read this one: they take turns
static void (*body)(void **);
static void **body_arguments;
static bool failed;
static char message[512];
static uint64_t random_state;
static ucontext_t home_context;
static jmp_buf home;

static unsigned random_below(unsigned n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(random_state >> 33) % n;
}

// Back to the scheduler, until it chooses this fibre again. swapcontext is what AddressSanitizer follows; it asks the
// kernel for the signal mask each time, which setjmp does not: ten times faster.
static __attribute__((noinline)) void leave() {
#ifdef __SANITIZE_ADDRESS__
  swapcontext(&fibres[current].start, &home_context);
#else
  if (!_setjmp(fibres[current].where)) _longjmp(home, 1);
#endif
}

static __attribute__((noinline)) void enter(unsigned thread) {
  Fibre &fibre = fibres[thread];
  current = thread;
  threadIdx.x = thread;
#ifdef __SANITIZE_ADDRESS__
  swapcontext(&home_context, &fibre.start);
#else
  if (_setjmp(home)) return;
  if (fibre.begun) _longjmp(fibre.where, 1);
  fibre.begun = true;
  setcontext(&fibre.start);
#endif
}

// A fibre serves its thread in every block: it is made once.
static void live() {
  for (;;) {
    body(body_arguments);
    states[current] = DONE;
    leave();
  }
}

static void make(Fibre &fibre) {
  if (!fibre.stack) fibre.stack = (char *)malloc(STACK);
  getcontext(&fibre.start);
  fibre.start.uc_stack.ss_sp = fibre.stack;
  fibre.start.uc_stack.ss_size = STACK;
  fibre.start.uc_link = 0;
  makecontext(&fibre.start, live, 0);
  fibre.begun = false;
}

// Ends the launch: the caller gets the message, the fibres are made anew.
static void fail(const char *what, const char *file, unsigned line) {
  if (!failed)
    snprintf(message, sizeof message, "%s:%u: block %u, thread %u: %s", file, line, blockIdx.x, threadIdx.x, what);
  failed = true;
  leave();
}

// Waits until `count` threads from `first` on have come.
static void meet(unsigned first, unsigned count, unsigned &come, State state) {
  states[current] = state;
  if (++come < count) return leave();
  come = 0;
  memset(states + first, READY, count);
}

static void barrier() { meet(0, threads, at_barrier, AT_BARRIER); }

// One of each kind of warp collective, by number: lanes of a warp must meet in the same.
enum Meeting { SYNC, SHUFFLE, UP, DOWN, XOR, BALLOT, REDUCE };

// Gives a value to the warp and returns the slots' parity, by which to read what the other lanes gave.
template <class T> static unsigned give(Meeting meeting, unsigned mask, T value) {
  static_assert(sizeof(T) <= 8, "a shuffle takes at most 8 bytes");
  unsigned warp = current / 32, parity = parities[current];
  if (mask != ~0u) fail("a warp collective without the full mask", "kernel", 0);
  if (in_warp[warp] == 0) meeting_in[warp] = meeting;
  if (meeting_in[warp] != meeting) fail("lanes of a warp met in different collectives", "kernel", 0);
  parities[current] ^= 1;
  memcpy(&slots[parity][current], &value, sizeof value);
  meet(warp * 32, 32, in_warp[warp], IN_WARP);
  return parity;
}

template <class T> static T of_lane(unsigned lane, unsigned parity) {
  T value;
  memcpy(&value, &slots[parity][current / 32 * 32 + lane], sizeof value);
  return value;
}

// As a GPU has it: with no such lane, a thread keeps its own value.
template <class T> static T shuffle(Meeting meeting, unsigned mask, T value, int lane) {
  unsigned parity = give(meeting, mask, value);
  return lane < 0 || lane > 31 ? value : of_lane<T>(lane, parity);
}

template <class T, class F> static T reduce(unsigned mask, T value, F combine) {
  unsigned parity = give(REDUCE, mask, value);
  T result = of_lane<T>(0, parity);
  for (unsigned lane = 1; lane < 32; lane++) result = combine(result, of_lane<T>(lane, parity));
  return result;
}

// Seed 0: always the first that can run. Else at random, but rather in the same warp: warps drift far apart.
static int choose(uint64_t seed) {
  unsigned from = 0;
  if (seed) from = (random_below(4) ? current / 32 : random_below(threads / 32)) * 32 + random_below(32);
  void *found = memchr(states + from, READY, threads - from);
  if (!found) found = memchr(states, READY, threads);
  return found ? (int)((unsigned char *)found - states) : -1;
}

extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_shared_memory[], __stop_shared_memory[];

__attribute__((no_sanitize_address, noinline)) static void poison_shared() {
  for (volatile unsigned char *byte = __start_shared_memory; byte < __stop_shared_memory; byte++) *byte = 0xff;
}

static void run_block(uint64_t seed) {
  poison_shared();
  memset(states, READY, threads);
  memset(in_warp, 0, sizeof in_warp);
  memset(parities, 0, sizeof parities);
  at_barrier = 0;
  for (int next; (next = choose(seed)) >= 0 && !failed;) enter((unsigned)next);
  if (failed) return;
  unsigned waiting = 0, inside = 0;
  for (unsigned i = 0; i < threads; i++) waiting += states[i] == AT_BARRIER, inside += states[i] == IN_WARP;
  if (!waiting && !inside) return;
  failed = true;
  snprintf(message, sizeof message, "block %u: stuck, %u threads at __syncthreads and %u in a warp collective that the others never reach",
           blockIdx.x, waiting, inside);
}

// Returns 0, or 1 with the reason in shim_message().
static int launch(unsigned grid, unsigned block, uint64_t seed, void (*kernel)(void **), void **arguments) {
  threads = block;
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  body = kernel;
  body_arguments = arguments;
  random_state = seed * 2654435761u + 1;
  failed = false;
  current = 0;
  for (unsigned i = 0; i < block; i++)
    if (!fibres[i].stack) make(fibres[i]);
  unsigned first = seed ? random_below(grid) : 0;  // with a seed, blocks come in another order too
  for (unsigned i = 0; i < grid && !failed; i++) {
    blockIdx.x = seed ? (first + grid - i) % grid : i;
    run_block(seed);
  }
  for (unsigned i = 0; failed && i < MOST; i++)
    if (fibres[i].stack) make(fibres[i]);
  return failed;
}

// A kernel's parameters, one letter each: p a pointer, f and d floating; i, u (4 bytes), l, m (8 bytes) integers.
template <class T> constexpr char letter() {
  if (std::is_pointer<T>::value) return 'p';
  if (std::is_floating_point<T>::value) return sizeof(T) == 4 ? 'f' : 'd';
  return std::is_signed<T>::value ? (sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'l' : '?')
                                  : (sizeof(T) == 4 ? 'u' : sizeof(T) == 8 ? 'm' : '?');
}

template <class... P> static const char *letters(void (*)(P...)) {
  static const char text[] = {letter<P>()..., 0};
  return text;
}

template <class... P, size_t... I>
static void call(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
  kernel(*(typename std::remove_cv<P>::type *)arguments[I]...);
}

template <class... P> static void call(void (*kernel)(P...), void **arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>());
}

// Where the compiler's own checks (-fsanitize=alignment,bounds,...) say that something happened.
struct Place { const char *file; unsigned line, column; };

}  // namespace shim

#define SHIM_CHECK(name, what)                                                                                   \
  extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_##name(shim::Place *place, ...) {          \
    shim::fail(what, place->file, place->line);                                                                  \
  }
SHIM_CHECK(type_mismatch_v1, "misaligned access")
SHIM_CHECK(out_of_bounds, "index out of bounds")
SHIM_CHECK(shift_out_of_bounds, "shift out of bounds")
SHIM_CHECK(add_overflow, "signed overflow")
SHIM_CHECK(sub_overflow, "signed overflow")
SHIM_CHECK(mul_overflow, "signed overflow")
SHIM_CHECK(negate_overflow, "signed overflow")
SHIM_CHECK(divrem_overflow, "division by zero")

extern "C" const char *shim_message() { return shim::message; }

// For each kernel: its parameters' letters, and its launch.
#define SHIM_KERNEL(name)                                                                                        \
  extern "C" const char *shim_letters_##name() { return shim::letters(name); }                                   \
  extern "C" int shim_launch_##name(unsigned grid, unsigned block, uint64_t seed, void **arguments) {            \
    return shim::launch(grid, block, seed, [](void **given) { shim::call(name, given); }, arguments);            \
  }

static inline void __syncthreads() { shim::barrier(); }
static inline void __syncwarp(unsigned mask = ~0u) { shim::give(shim::SYNC, mask, 0); }
static inline void __threadfence() {}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane) {
  return shim::shuffle(shim::SHUFFLE, mask, value, lane & 31);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  return shim::shuffle(shim::UP, mask, value, (int)(threadIdx.x % 32) - (int)by);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  return shim::shuffle(shim::DOWN, mask, value, (int)(threadIdx.x % 32) + (int)by);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int with) {
  return shim::shuffle(shim::XOR, mask, value, (int)(threadIdx.x % 32) ^ with);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned parity = shim::give(shim::BALLOT, mask, predicate != 0), bits = 0;
  for (unsigned lane = 0; lane < 32; lane++) bits |= (unsigned)shim::of_lane<bool>(lane, parity) << lane;
  return bits;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }
template <class T> static inline T __reduce_add_sync(unsigned mask, T value) {
  static_assert(std::is_integral<T>::value && sizeof(T) == 4, "__reduce_*_sync takes 32-bit integers");
  return (T)shim::reduce(mask, (unsigned)value, [](unsigned a, unsigned b) { return a + b; });
}
template <class T> static inline T __reduce_max_sync(unsigned mask, T value) {
  return shim::reduce(mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <class T> static inline T __reduce_min_sync(unsigned mask, T value) {
  return shim::reduce(mask, value, [](T a, T b) { return a < b ? a : b; });
}

// Atomics of integers only: of floats, the order would decide the result.
#define SHIM_ATOMIC(name, result)                                                                                \
  template <class T> static inline T name(T *at, typename std::common_type<T>::type value) {                     \
    static_assert(std::is_integral<T>::value, "atomics of floats are banned: their order would decide");         \
    T old = *at;                                                                                                 \
    *at = (T)(result);                                                                                           \
    return old;                                                                                                  \
  }
SHIM_ATOMIC(atomicAdd, (typename std::make_unsigned<T>::type)old + (typename std::make_unsigned<T>::type)value)
SHIM_ATOMIC(atomicMax, old > value ? old : value)
SHIM_ATOMIC(atomicMin, old < value ? old : value)
SHIM_ATOMIC(atomicOr, old | value)
SHIM_ATOMIC(atomicAnd, old & value)
SHIM_ATOMIC(atomicExch, value)

template <class T> static inline T __ldcs(const T *at) { return *at; }
template <class T> static inline T __ldcg(const T *at) { return *at; }
template <class T> static inline T __ldg(const T *at) { return *at; }
template <class T> static inline void __stcs(T *at, T value) { *at = value; }
template <class T> static inline void __stcg(T *at, T value) { *at = value; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline unsigned __float_as_uint(float value) { return (unsigned)__float_as_int(value); }
static inline float __uint_as_float(unsigned bits) { return __int_as_float((int)bits); }
static inline int __float2int_rn(float value) { return (int)rintf(value); }
static inline float __int2float_rn(int value) { return (float)value; }
static inline float __uint2float_rn(unsigned value) { return (float)value; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
static inline int __clz(int bits) { return bits ? __builtin_clz((unsigned)bits) : 32; }
static inline int __clzll(long long bits) { return bits ? __builtin_clzll((unsigned long long)bits) : 64; }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
static inline unsigned __brev(unsigned bits) {
  unsigned turned = 0;
  for (int i = 0; i < 32; i++) turned |= (bits >> i & 1u) << (31 - i);
  return turned;
}
