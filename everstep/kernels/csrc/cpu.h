// What the C files share that CUDA has no use for.
#ifndef EVERSTEP_CPU_H
#define EVERSTEP_CPU_H

// One binary for every x86-64: the best of three versions is chosen where the library is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif

#endif
