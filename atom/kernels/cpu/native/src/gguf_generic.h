/* Included by each instruction set's file inside its own target: plain loops that gcc and clang vectorise. */

/* Factors and minima of 64 columns' groups in one chunk. */
static void unpack_scales(const gguf_layout *layout, const uint8_t *chunk, float *factors, float *minima)
{
    const uint16_t *halves = (const uint16_t *)chunk;
    float d[GGUF_PANEL], dmin[GGUF_PANEL];
    for (int c = 0; c < GGUF_PANEL; c++)
        d[c] = gguf_half(halves[c]);
    if (layout->has_minima) {
        const uint8_t *packed = chunk + 256;
        for (int c = 0; c < GGUF_PANEL; c++)
            dmin[c] = gguf_half(halves[64 + c]);
        for (int g = 0; g < 4; g++)
            for (int c = 0; c < GGUF_PANEL; c++) {
                const int scale = packed[g * 64 + c], low = packed[(g + 4) * 64 + c], mixed = packed[(g + 8) * 64 + c];
                factors[g * 64 + c] = d[c] * (float)(scale & 63);
                minima[g * 64 + c] = dmin[c] * (float)(low & 63);
                factors[(g + 4) * 64 + c] = d[c] * (float)((mixed & 15) | scale >> 6 << 4);
                minima[(g + 4) * 64 + c] = dmin[c] * (float)(mixed >> 4 | low >> 6 << 4);
            }
    } else if (layout->scale_k == 16) {
        const int8_t *scales = (const int8_t *)chunk + 128;
        for (int g = 0; g < 16; g++)
            for (int c = 0; c < GGUF_PANEL; c++)
                factors[g * 64 + c] = d[c] * (float)scales[g * 64 + c];
    } else {
        memcpy(factors, d, sizeof d);
    }
}

/* One group's quants as bytes [8 s][64 c][4]. */
GGUF_INLINE void unpack_quants(const gguf_layout *layout, const uint8_t *group, uint8_t *quants)
{
    for (int s = 0; s < 4; s++)
        for (int i = 0; i < 256; i++) {
            quants[s * 256 + i] = group[s * 256 + i] & 15;
            quants[(s + 4) * 256 + i] = group[s * 256 + i] >> 4;
        }
    if (layout->high_bits == 1)
        for (int i = 0; i < 2048; i++)
            quants[i] |= (group[1024 + i / 8] >> i % 8 & 1) << 4;
    if (layout->high_bits == 2)
        for (int s = 0; s < 8; s++)
            for (int i = 0; i < 256; i++)
                quants[s * 256 + i] |= (group[1024 + (s >> 2) * 256 + i] >> 2 * (s & 3) & 3) << 4;
}

/* x [k] in groups of 32: values rounded to nearest even, amax of the group is 127. What is not finite makes the scale so. */
static void round_row(const float *x, int64_t k, int8_t *values, float *scales, int32_t *sums)
{
    for (int64_t g = 0; g < k / GGUF_GROUP; g++) {
        const float *from = x + g * GGUF_GROUP;
        union { int32_t bits; float value; } top = {0};
        int32_t bits[GGUF_GROUP], rounded[GGUF_GROUP];
        memcpy(bits, from, sizeof bits);
        for (int i = 0; i < GGUF_GROUP; i++) {
            const int32_t magnitude = bits[i] & 0x7fffffff;
            top.bits = magnitude > top.bits ? magnitude : top.bits;
        }
        const float inverse = top.value > 1e-30f ? 127.0f / top.value : 0.0f;
        scales[g] = top.value * (1.0f / 127.0f);
        float shifted[GGUF_GROUP];
        for (int i = 0; i < GGUF_GROUP; i++)
            shifted[i] = from[i] * inverse + 0x1.8p23f;
        memcpy(rounded, shifted, sizeof rounded);
        for (int half = 0; half < 2; half++) {
            int32_t sum = 0;
            for (int i = half * 16; i < half * 16 + 16; i++) {
                values[g * GGUF_GROUP + i] = (int8_t)rounded[i];
                sum += (int8_t)rounded[i];
            }
            sums[g * 2 + half] = sum;
        }
    }
}
