/* Numbers of bfloat16: how they are rounded, and which vectors and tiles of this processor take them. */
#pragma once

#include "vectors.h"

typedef uint16_t vh __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

INLINE vf whole(vh x) {
#if defined(__AVX2__) && WIDTH == 8
    /* GCC 12 takes two instructions more. */
    return (vf)((vi)_mm256_cvtepu16_epi32((__m128i)x) << 16);
#else
    return (vf)(__builtin_convertvector(x, vi) << 16);
#endif
}

/* Round to the nearest bfloat16, ties to even; a NaN stays NaN. */
INLINE vh halves(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_convertvector((vu)choose(x == x, (vf)rounded, (vf)((vi){0} + 0x7fc00000)) >> 16, vh);
#endif
}

INLINE vf halved(vf x) { return whole(halves(x)); }

/* The rounding errors of n numbers. */
INLINE void rounding(int64_t n, const float *numbers, float *to) {
    for (int64_t i = 0; i < n; i += WIDTH)
        *(vf *)(to + i) = *(const vf *)(numbers + i) - halved(*(const vf *)(numbers + i));
}

/* Rows of a tile, and numbers of a row of the left one. */
enum { SIDE = 16, DEPTH = 32 };

/* Products of pairs of numbers of bfloat16, on vectors. */
#if WIDTH == 16 && defined(__AVX512BF16__)
#define HAVE_PAIRS 1
#else
#define HAVE_PAIRS 0
#endif

#if HAVE_PAIRS && defined(__AMX_BF16__) && defined(__linux__)
#define HAVE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

/* Linux permits tiles, state 18 of a processor, on request: ARCH_REQ_XCOMP_PERM. */
static int tiles_at_hand(void) {
    static int known = -1;
    if (known < 0) known = !syscall(SYS_arch_prctl, 0x1023, 18);
    return known;
}

/* Whether products are rounded: if requested, and if rows fill a tile. Each thread configures tiles for itself, and
   other libraries configure them differently, so `end_halves` must release them. */
SHARED int begin_halves(int wanted, int64_t rows) {
    if (!wanted || rows < SIDE || !tiles_at_hand()) return 0;
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int t = 0; t < 8; t++) shape.bytes[t] = 4 * SIDE, shape.rows[t] = SIDE;
    __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
    return 1;
}

INLINE void end_halves(int half) {
    if (half) __asm__ volatile("tilerelease" ::: "memory");
}
#else
#define HAVE_TILES 0
BEGIN_STAND_INS
INLINE int tiles_at_hand(void) { return 0; }
INLINE int begin_halves(int wanted, int64_t rows) { return HAVE_PAIRS && wanted && rows >= SIDE; }
INLINE void end_halves(int half) {}
END_STAND_INS
#endif
