/* GGUF blocks into panels, and single rows out of them. */
#include <string.h>

#include "gguf.h"
#include "linear_gguf.h"

static const gguf_layout layouts[] = {
    /* format   block_k bytes group header offset minima scale_k high_bits */
    {ATOM_Q4_0, 32, 18, 1024, 128, 8, 0, 32, 0},
    {ATOM_Q8_0, 32, 34, 2048, 128, 128, 0, 32, 4},
    {ATOM_Q4_K, 256, 144, 1024, 1024, 0, 1, 32, 0},
    {ATOM_Q6_K, 256, 210, 1536, 1152, 32, 0, 16, 2},
    {ATOM_Q5_0, 32, 22, 1280, 128, 16, 0, 32, 1},
    {ATOM_Q5_K, 256, 176, 1280, 1024, 0, 1, 32, 1},
};

const gguf_layout *gguf_layout_of(int32_t format)
{
    for (unsigned i = 0; i < sizeof layouts / sizeof *layouts; i++)
        if (layouts[i].format == format)
            return layouts + i;
    return 0;
}

int64_t atom_gguf_packed_bytes(int32_t format, int64_t n, int64_t k)
{
    const gguf_layout *layout = gguf_layout_of(format);
    if (!layout || k % layout->block_k)
        return -1;
    return (n + GGUF_PANEL - 1) / GGUF_PANEL * gguf_panel_bytes(layout, k);
}

/* The 256 (or 32) quants of one block as the file has them, unsigned. */
static void block_quants(const gguf_layout *layout, const uint8_t *block, uint8_t *quants)
{
    switch (layout->format) {
    case ATOM_Q8_0:
        for (int i = 0; i < 32; i++)
            quants[i] = block[2 + i] ^ 0x80;
        break;
    case ATOM_Q4_0:
    case ATOM_Q5_0: {
        const uint8_t *low = block + (layout->format == ATOM_Q4_0 ? 2 : 6);
        for (int i = 0; i < 16; i++) {
            quants[i] = low[i] & 15;
            quants[i + 16] = low[i] >> 4;
        }
        if (layout->format == ATOM_Q5_0)
            for (int i = 0; i < 32; i++)
                quants[i] |= (block[2 + i / 8] >> i % 8 & 1) << 4;
        break;
    }
    case ATOM_Q4_K:
    case ATOM_Q5_K: {
        const uint8_t *low = block + (layout->format == ATOM_Q4_K ? 16 : 48);
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++) {
                quants[g * 32 + i] = low[g / 2 * 32 + i] >> g % 2 * 4 & 15;
                if (layout->format == ATOM_Q5_K)
                    quants[g * 32 + i] |= (block[16 + i] >> g & 1) << 4;
            }
        break;
    }
    case ATOM_Q6_K:
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, row = i % 128 / 32, j = i % 32;
            const int low = block[half * 64 + row % 2 * 32 + j] >> row / 2 * 4 & 15;
            quants[i] = low | (block[128 + half * 32 + j] >> 2 * row & 3) << 4;
        }
        break;
    }
}

/* Four values at a time: word s holds values 4 s .. 4 s + 3. */
static void put_group(const gguf_layout *layout, uint8_t *group, int column, const uint8_t *quants)
{
    uint32_t words[8], *to = (uint32_t *)group + column;
    memcpy(words, quants, sizeof words);
    if (layout->high_bits == 4) {
        for (int s = 0; s < 8; s++)
            to[s * 64] = words[s];
        return;
    }
    for (int s = 0; s < 4; s++)
        to[s * 64] = (words[s] & 0x0f0f0f0f) | (words[s + 4] & 0x0f0f0f0f) << 4;
    for (int s = 0; s < 8; s++) {
        const uint32_t high = words[s] >> 4;
        if (layout->high_bits == 1)
            group[1024 + s * 32 + column / 2] |= ((high & 0x01010101) * 0x10204080 >> 28) << column % 2 * 4;
        if (layout->high_bits == 2)
            to[256 + (s >> 2) * 64] |= (high & 0x03030303) << 2 * (s & 3);
    }
}

static void put_block(const gguf_layout *layout, uint8_t *chunk, int column, const uint8_t *block)
{
    const int high = layout->high_bits;
    memcpy(chunk + column * 2, block + (high == 2 ? 208 : 0), 2);
    if (layout->has_minima) {
        memcpy(chunk + 128 + column * 2, block + 2, 2);
        for (int i = 0; i < 12; i++)
            chunk[256 + i * 64 + column] = block[4 + i];
    } else if (layout->scale_k == 16) {
        for (int i = 0; i < 16; i++)
            chunk[128 + i * 64 + column] = block[192 + i];
    }
    uint8_t quants[256];
    block_quants(layout, block, quants);
    for (int g = 0; g < layout->block_k / GGUF_GROUP; g++)
        put_group(layout, chunk + layout->header_bytes + g * layout->group_bytes, column, quants + g * GGUF_GROUP);
}

typedef struct {
    const gguf_layout *layout;
    const uint8_t *blocks;
    int64_t rows, k, first_column, panel_step;
    uint8_t *panels;
} pack_args;

/* The panels that the rows touch, a panel a piece. */
static void pack_body(atom_worker *w, const void *arguments)
{
    const pack_args *a = arguments;
    const gguf_layout *layout = a->layout;
    const int64_t blocks_per_row = a->k / layout->block_k, chunk = gguf_chunk_bytes(layout);
    const int64_t first = a->first_column / GGUF_PANEL;
    const int64_t last_panel = (a->first_column % GGUF_PANEL + a->rows - 1) / GGUF_PANEL;
    for (int64_t piece; (piece = atom_next(w)) <= last_panel;) {
        uint8_t *panel = a->panels + (first + piece * a->panel_step) * gguf_panel_bytes(layout, a->k);
        for (int64_t column = 0; column < GGUF_PANEL; column++) {
            const int64_t row = piece * GGUF_PANEL + column - a->first_column % GGUF_PANEL;
            if (row < 0 || row >= a->rows)
                continue;
            const uint8_t *source = a->blocks + row * blocks_per_row * layout->block_bytes;
            for (int64_t b = 0; b < blocks_per_row; b++)
                put_block(layout, panel + b * chunk, column, source + b * layout->block_bytes);
        }
    }
    atom_barrier(w);
}

/* Blocks [rows, k / block_k] of a GGUF tensor into panels that were zeroed, as columns first_column, first_column + 1 ...;
 * every panel_step-th panel is used (2: gate and up alternate; first_column is then a multiple of 64). */
int atom_gguf_pack(int32_t format, const void *blocks, int64_t rows, int64_t k, void *panels, int64_t first_column,
                   int64_t panel_step)
{
    const gguf_layout *layout = gguf_layout_of(format);
    if (!layout || k % layout->block_k || (panel_step > 1 && first_column % GGUF_PANEL))
        return -1;
    if (rows < 1)
        return 0;
    const pack_args arguments = {layout, blocks, rows, k, first_column, panel_step, panels};
    atom_run(pack_body, &arguments);
    return 0;
}

void atom_gguf_gather_row(const atom_weight *weight, int64_t row, float scale, float *y)
{
    const gguf_layout *layout = gguf_layout_of(weight->format);
    const int64_t k = weight->k;
    const uint8_t *panel = (const uint8_t *)weight->data + row / GGUF_PANEL * gguf_panel_bytes(layout, k);
    const int column = row % GGUF_PANEL;
    for (int64_t b = 0; b < k / layout->block_k; b++) {
        const uint8_t *chunk = panel + b * gguf_chunk_bytes(layout);
        for (int i = 0; i < layout->block_k; i += layout->scale_k) {
            const uint8_t *group = chunk + layout->header_bytes + i / GGUF_GROUP * layout->group_bytes;
            float factor, minimum;
            gguf_scale_at(layout, chunk, column, i, &factor, &minimum);
            for (int j = 0; j < layout->scale_k; j++) {
                const int quant = gguf_quant(layout, group, column, (i + j) % GGUF_GROUP);
                y[b * layout->block_k + i + j] = scale * (factor * (float)(quant - layout->offset) - minimum);
            }
        }
    }
}
