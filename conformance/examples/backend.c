/* A backend of edge0 in one file of C. It claims "dequant" and "router"; spec/11-backend.md describes how it talks.
 *
 *     gcc -O2 -o backend backend.c -lm && python -m conformance --exec ./backend
 *
 * A request is a line of JSON, without white space, and the safetensors file that it announces. That makes `find` all
 * the parsing there is: it looks for "name": in a text and returns what follows. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef long long Int;
typedef struct { Int rows, cols; const char *dtype; const uint8_t *data; } Tensor;
static char line[1 << 20], *blob;

static const char *find(const char *text, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *found = strstr(text, key);
    return found ? found + strlen(key) : NULL;
}

static Int number(const char *name) { const char *at = find(line, name); return at ? strtoll(at, NULL, 10) : 0; }

/* The entry of a tensor: {"dtype":"F32","shape":[2,60],"data_offsets":[0,480]}. A vector has one row. */
static Tensor tensor(const char *name) {
    uint64_t header;
    memcpy(&header, blob, 8);
    const char *entry = find(blob + 8, name);
    if (!entry) return (Tensor){0, 0, NULL, NULL};
    char *end;
    Tensor t = {1, strtoll(find(entry, "shape") + 1, &end, 10), find(entry, "dtype") + 1, NULL};
    if (*end == ',') t.rows = t.cols, t.cols = strtoll(end + 1, NULL, 10);
    t.data = (uint8_t *)blob + 8 + header + strtoll(find(entry, "data_offsets") + 1, NULL, 10);
    return t;
}

static void fail(const char *kind, const char *message) {
    printf("{\"error\":{\"kind\":\"%s\",\"message\":\"%s\"}}\n", kind, message);
}

/* A reply: its line, then 8 bytes with the length of the header, the header, the data of up to two tensors. */
static void reply(const char *header, const void *first, size_t n, const void *second, size_t m) {
    uint64_t length = strlen(header);
    printf("{\"bytes\":%zu}\n", 8 + (size_t)length + n + m);
    fwrite(&length, 8, 1, stdout);
    fwrite(header, 1, length, stdout);
    fwrite(first, 1, n, stdout);
    fwrite(second, 1, m, stdout);
}

static float from_bits(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }

/* Element i of a float32, float16 (F16) or bfloat16 (BF16) tensor, widened exactly. */
static float element(Tensor t, Int i) {
    uint16_t half;
    float f;
    if (!strncmp(t.dtype, "F32", 3)) { memcpy(&f, t.data + 4 * i, 4); return f; }
    memcpy(&half, t.data + 2 * i, 2);
    if (t.dtype[0] == 'B') return from_bits((uint32_t)half << 16);
    int exponent = half >> 10 & 31, fraction = half & 1023;
    f = exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    if (exponent == 31) f = fraction ? NAN : INFINITY;
    return half >> 15 ? -f : f;
}

/* [DEQ-002] code * scale + bias; [DEQ-003] codes lie in their words lowest bits first, which is little-endian bytes. */
static void dequantize(void) {
    Tensor packed = tensor("packed"), scales = tensor("scales"), biases = tensor("biases");
    Int bits = number("bits"), group = number("group_size"), cols = packed.cols * 32 / bits;
    float *weights = malloc(4 * packed.rows * cols + 1);
    for (Int i = 0; i < packed.rows * cols; i++) {
        Int g = i / cols * scales.cols + i % cols / group; /* [DEQ-006] */
        int code = bits == 8 ? packed.data[i] : packed.data[i / 2] >> 4 * (i % 2) & 15;
        weights[i] = code * element(scales, g) + element(biases, g);
    }
    char header[160];
    Int bytes = 4 * packed.rows * cols;
    snprintf(header, sizeof header, "{\"weights\":{\"dtype\":\"F32\",\"shape\":[%lld,%lld],\"data_offsets\":[0,%lld]}}",
             packed.rows, cols, bytes);
    reply(header, weights, bytes, "", 0);
    free(weights);
}

/* [RTR-003] Ids of the k largest values, largest first, equal ones by ascending id: only a larger one takes over. */
static void choose(const float *values, Int n, Int k, Int *chosen) {
    char *taken = calloc(n, 1);
    for (Int j = 0; j < k; j++) {
        Int best = -1;
        for (Int e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || values[e] > values[best])) best = e;
        taken[chosen[j] = best] = 1;
    }
    free(taken);
}

/* [RTR-023] All groups but the best, by the sum of their two largest choice values, drop to minus infinity. */
static void keep_best_groups(float *choice, Int experts, Int groups, Int top) {
    Int size = experts / groups, two[2], *best = malloc(8 * top);
    float *sums = malloc(4 * groups);
    for (Int g = 0; g < groups; g++) {
        choose(choice + g * size, size, size < 2 ? 1 : 2, two);
        sums[g] = choice[g * size + two[0]] + (size < 2 ? 0 : choice[g * size + two[1]]);
    }
    choose(sums, groups, top, best);
    for (Int g = 0, kept; g < groups; g++) {
        kept = 0;
        for (Int j = 0; j < top; j++) kept |= best[j] == g;
        for (Int e = g * size; !kept && e < (g + 1) * size; e++) choice[e] = -INFINITY;
    }
    free(best), free(sums);
}

/* One token: [RTR-011] softmax over the chosen logits, or [RTR-024] chosen scores over their sum, times the scale. */
static void route_token(const float *logits, Int n, Int k, double scale, Int *experts, float *weights) {
    Int groups = number("num_groups");
    Tensor bias = tensor("expert_bias");
    float *score = malloc(4 * n), *choice = malloc(4 * n);
    for (Int e = 0; e < n; e++) {
        score[e] = groups ? 1 / (1 + expf(-logits[e])) : logits[e];
        choice[e] = score[e] + (bias.data ? element(bias, e) : 0);
    }
    if (groups) keep_best_groups(choice, n, groups, number("top_groups"));
    choose(choice, n, k, experts);
    double sum = groups ? 1e-20 : 0, top = score[experts[0]];
    for (Int j = 0; j < k; j++) sum += groups ? score[experts[j]] : exp(score[experts[j]] - top);
    for (Int j = 0; j < k; j++) weights[j] = scale * (groups ? score[experts[j]] : exp(score[experts[j]] - top)) / sum;
    free(score), free(choice);
}

static void route(void) {
    Tensor t = tensor("logits");
    const float *logits = (const float *)t.data;
    Int k = number("top_k"), n = t.cols, groups = number("num_groups");
    char text[320];
    for (Int i = 0; i < t.rows * n; i++) /* [RTR-002] */
        if (!isfinite(logits[i])) {
            snprintf(text, sizeof text, "token %lld expert %lld: %f", i / n, i % n, logits[i]);
            fail("NonFiniteError", text);
            return;
        }
    Int available = !groups ? n : n % groups ? 0 : number("top_groups") * (n / groups); /* [RTR-020] */
    if (k < 1 || k > available) {
        snprintf(text, sizeof text, "top_k %lld of %lld experts in %lld groups", k, n, groups);
        fail("ShapeError", text);
        return;
    }
    Int *experts = malloc(8 * t.rows * k);
    float *weights = malloc(4 * t.rows * k);
    double scale = groups ? strtod(find(line, "scale"), NULL) : 1;
    for (Int i = 0; i < t.rows; i++) route_token(logits + i * n, n, k, scale, experts + i * k, weights + i * k);
    snprintf(text, sizeof text, "{\"experts\":{\"dtype\":\"I64\",\"shape\":[%lld,%lld],\"data_offsets\":[0,%lld]},"
             "\"weights\":{\"dtype\":\"F32\",\"shape\":[%lld,%lld],\"data_offsets\":[%lld,%lld]}}",
             t.rows, k, 8 * t.rows * k, t.rows, k, 8 * t.rows * k, 12 * t.rows * k);
    reply(text, experts, 8 * t.rows * k, weights, 4 * t.rows * k);
    free(experts), free(weights);
}

int main(void) {
    while (fgets(line, sizeof line, stdin)) { /* [BCK-025] the end of stdin ends the program */
        size_t bytes = number("bytes");
        blob = calloc(bytes + 9, 1);
        if (fread(blob, 1, bytes, stdin) != bytes) return 1;
        if (bytes) blob[7 + *(uint64_t *)blob] = 0; /* so that `find` ends with the header */
        const char *operation = find(line, "operation");
        if (!operation) return 1;
        if (!strncmp(operation, "\"hello\"", 7))
            puts("{\"protocol\":1,\"name\":\"example-c\",\"claims\":[\"dequant\",\"router\"]}");
        else if (!strncmp(operation, "\"dequantize\"", 12)) dequantize();
        else if (!strncmp(operation, "\"route\"", 7)) route();
        else fail("BackendError", "an operation that this program does not know");
        fflush(stdout);
        free(blob);
    }
    return 0;
}
