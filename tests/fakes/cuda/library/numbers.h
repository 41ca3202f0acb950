/* The elements of a collective: NCCL's types, read and written as double or as a 64-bit integer. */
#ifndef NUMBERS_H
#define NUMBERS_H
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16 };

static inline int width_of(int type) {
    switch (type) {
        case INT32: case UINT32: case FLOAT: return 4;
        case INT64: case UINT64: case DOUBLE: return 8;
        case HALF: case BFLOAT16: return 2;
        default: return 1;
    }
}
static inline int is_float(int type) { return type >= HALF && type <= BFLOAT16; }

static inline double half_to_double(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits >> 15 ? -size : size;
}
static inline uint16_t double_to_half(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    int exponent;
    if (isnan(value)) return 0x7e00;
    value = fabs(value);
    if (value >= 65520) return sign | 0x7c00;
    if (value == 0) return sign;
    double fraction = frexp(value, &exponent);
    if (exponent < -13) return sign | (uint16_t)lrint(ldexp(value, 24));
    return sign + (uint16_t)(((exponent + 14) << 10) + lrint(ldexp(fraction, 11)) - 1024);
}
static inline double get_float(const char *from, size_t at, int type) {
    uint16_t half;
    uint32_t bits;
    float single;
    double value;
    switch (type) {
        case HALF: memcpy(&half, from + 2 * at, 2); return half_to_double(half);
        case BFLOAT16: memcpy(&half, from + 2 * at, 2); bits = (uint32_t)half << 16; memcpy(&single, &bits, 4); return single;
        case FLOAT: memcpy(&single, from + 4 * at, 4); return single;
        default: memcpy(&value, from + 8 * at, 8); return value;
    }
}
static inline void set_float(char *to, size_t at, int type, double value) {
    uint16_t half;
    uint32_t bits;
    float single = (float)value;
    switch (type) {
        case HALF: half = double_to_half(value); memcpy(to + 2 * at, &half, 2); break;
        case BFLOAT16:
            memcpy(&bits, &single, 4);
            half = isnan(single) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            memcpy(to + 2 * at, &half, 2);
            break;
        case FLOAT: memcpy(to + 4 * at, &single, 4); break;
        default: memcpy(to + 8 * at, &value, 8);
    }
}
static inline int64_t get_integer(const char *from, size_t at, int type) {
    switch (type) {
        case INT8: return ((const int8_t *)from)[at];
        case UINT8: return ((const uint8_t *)from)[at];
        case INT32: return ((const int32_t *)from)[at];
        case UINT32: return ((const uint32_t *)from)[at];
        default: return ((const int64_t *)from)[at];
    }
}
static inline void set_integer(char *to, size_t at, int type, int64_t value) {
    switch (width_of(type)) {
        case 1: ((int8_t *)to)[at] = (int8_t)value; break;
        case 4: ((int32_t *)to)[at] = (int32_t)value; break;
        default: ((int64_t *)to)[at] = value;
    }
}
#endif
