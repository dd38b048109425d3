/* The inner loops of linear_tile.h for every number of rows, and which of them a product takes. */
#include "linear_tile.h"

#include <stddef.h>

#if VL == 16
#define MANY_U8 14
#define MANY_F32 14
#define MANY_WIDE 12
#define MANY_INT4 6
#define FEW_U8 6
#define FEW_F32 4
#define FEW_WIDE 4
#define FEW_INT4 2
#elif defined(__ARM_NEON)
#define MANY_U8 8
#define MANY_F32 12
#define MANY_WIDE 10
#define MANY_INT4 4
#define FEW_U8 4
#define FEW_F32 4
#define FEW_WIDE 4
#define FEW_INT4 2
#else
#define MANY_U8 6
#define MANY_F32 6
#define MANY_WIDE 4
#define MANY_INT4 2
#define FEW_U8 2
#define FEW_F32 2
#define FEW_WIDE 2
#define FEW_INT4 1
#endif

/* One function for each (product, rows): few rows take four vectors of columns at once, many take two. */
#define TILE(name, product, few, many, rows)                                                                             \
    static void name##_##rows(const atom_tile *t)                                                                        \
    {                                                                                                                    \
        if (rows <= few)                                                                                                 \
            tile_body(product, rows, 4, t);                                                                              \
        else if (rows <= many)                                                                                           \
            tile_body(product, rows, 2, t);                                                                              \
    }
#define TILE_INT4(rows)                                                                                                  \
    static void int4_##rows(const atom_tile *t)                                                                          \
    {                                                                                                                    \
        if (rows <= FEW_INT4)                                                                                            \
            tile_int4_body(rows, 4, t);                                                                                  \
        else if (rows <= MANY_INT4)                                                                                      \
            tile_int4_body(rows, 2, t);                                                                                  \
    }
#define EACH(name, product, few, many)                                                                                   \
    TILE(name, product, few, many, 1)                                                                                    \
    TILE(name, product, few, many, 2)                                                                                    \
    TILE(name, product, few, many, 3)                                                                                    \
    TILE(name, product, few, many, 4)                                                                                    \
    TILE(name, product, few, many, 5)                                                                                    \
    TILE(name, product, few, many, 6)                                                                                    \
    TILE(name, product, few, many, 7)                                                                                    \
    TILE(name, product, few, many, 8)                                                                                    \
    TILE(name, product, few, many, 9)                                                                                    \
    TILE(name, product, few, many, 10)                                                                                   \
    TILE(name, product, few, many, 11)                                                                                   \
    TILE(name, product, few, many, 12)                                                                                   \
    TILE(name, product, few, many, 13)                                                                                   \
    TILE(name, product, few, many, 14)
#define NAMES(name)                                                                                                      \
    {                                                                                                                    \
        name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8, name##_9, name##_10, name##_11,  \
            name##_12, name##_13, name##_14                                                                              \
    }

EACH(f32, PRODUCT_F32, FEW_F32, MANY_F32)
EACH(wide, PRODUCT_WIDE, FEW_WIDE, MANY_WIDE)
EACH(u8, PRODUCT_U8, FEW_U8, MANY_U8)
#if HAS_DOT_BF16
EACH(bf16, PRODUCT_BF16, FEW_U8, MANY_U8)
#endif
TILE_INT4(1) TILE_INT4(2) TILE_INT4(3) TILE_INT4(4) TILE_INT4(5) TILE_INT4(6)

static const atom_tile_function tiles[NUM_PRODUCTS][MAX_TILE_ROWS] = {
    [PRODUCT_F32] = NAMES(f32),
    [PRODUCT_WIDE] = NAMES(wide),
#if HAS_DOT_BF16
    [PRODUCT_BF16] = NAMES(bf16),
#endif
    [PRODUCT_U8] = NAMES(u8),
    [PRODUCT_INT4] = {int4_1, int4_2, int4_3, int4_4, int4_5, int4_6},
};
static const int few_rows[NUM_PRODUCTS] = {FEW_F32, FEW_WIDE, FEW_U8, FEW_U8, FEW_INT4};
static const int many_rows[NUM_PRODUCTS] = {MANY_F32, MANY_WIDE, MANY_U8, MANY_U8, MANY_INT4};

int atom_tile_rows(int product, int is_few) { return is_few ? few_rows[product] : many_rows[product]; }

int atom_tile_passes(int product, int rows) { return PANEL / (VL * (rows <= few_rows[product] ? 4 : 2)); }

atom_tile_function atom_tile_for(int product, int rows) {
    return rows < 1 || rows > many_rows[product] ? NULL : tiles[product][rows - 1];
}
