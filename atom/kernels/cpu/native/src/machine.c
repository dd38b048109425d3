/* Whether the processor has what this library was compiled for. Called once, before anything else. */
#include "atom.h"

/* 1, or 0: nothing else of the library may be called. */
int atom_can_run(void) {
    int can = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
#ifdef __AVX2__
    can &= !!__builtin_cpu_supports("avx2") & !!__builtin_cpu_supports("fma");
#endif
#ifdef __AVX512F__
    can &= !!__builtin_cpu_supports("avx512f");
#endif
#ifdef __AVX512BW__
    can &= !!__builtin_cpu_supports("avx512bw") & !!__builtin_cpu_supports("avx512vl") & !!__builtin_cpu_supports("avx512dq");
#endif
#ifdef __AVX512VNNI__
    can &= !!__builtin_cpu_supports("avx512vnni");
#endif
#ifdef __AVX512BF16__
    can &= !!__builtin_cpu_supports("avx512bf16");
#endif
#endif
    return can;
}
