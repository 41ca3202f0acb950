/* The loops over bits. Each is also compiled for wide registers, and chosen by the processor at run time. */

#include "reductions.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define FOR_EACH_WIDTH(LOOP, TYPE, BITS)                                                   \
    LOOP(TYPE, BITS, plain, )                                                              \
    LOOP(TYPE, BITS, avx2, __attribute__((target("avx2"))))                                \
    LOOP(TYPE, BITS, avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#define CHOOSE(NAME) (width == 2 ? NAME##_avx512 : width == 1 ? NAME##_avx2 : NAME##_plain)
#else
#define FOR_EACH_WIDTH(LOOP, TYPE, BITS) LOOP(TYPE, BITS, plain, )
#define CHOOSE(NAME) NAME##_plain
#endif

#if defined(__GNUC__) && defined(__x86_64__)
static int width = 0;
#endif

void choose_width(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        width = 1;
    if (width && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        width = 2;
#endif
}

#define EXTREMES(TYPE, BITS, NAME, TARGET)                                                                 \
    TARGET static void extremes##BITS##_##NAME(const void *memory, size_t count, int64_t *low, int64_t *high) \
    {                                                                                                      \
        const TYPE *data = memory;                                                                         \
        const TYPE mask = INT##BITS##_MAX;                                                                 \
        TYPE least = mask, most = 0;                                                                       \
        for (size_t i = 0; i < count; i++) {                                                               \
            TYPE bits = data[i] & mask;                                                                    \
            least = bits < least ? bits : least;                                                           \
            most = bits > most ? bits : most;                                                              \
        }                                                                                                  \
        *low = least;                                                                                      \
        *high = most;                                                                                      \
    }

FOR_EACH_WIDTH(EXTREMES, int16_t, 16)
FOR_EACH_WIDTH(EXTREMES, int32_t, 32)
FOR_EACH_WIDTH(EXTREMES, int64_t, 64)

/* Counts in blocks so small that a count fits the element's own type: the compiler can then keep it in a wide register. */
#define BELOW(TYPE, BITS, NAME, TARGET)                                                                            \
    TARGET static void below##BITS##_##NAME(const void *memory, size_t count, int64_t limit, int64_t *zeros, int64_t *small) \
    {                                                                                                              \
        const TYPE *data = memory;                                                                                 \
        const TYPE mask = INT##BITS##_MAX, least = (TYPE)limit;                                                    \
        for (size_t start = 0; start < count; start += 16384) {                                                    \
            const size_t end = count - start < 16384 ? count : start + 16384;                                      \
            TYPE none = 0, below = 0;                                                                              \
            for (size_t i = start; i < end; i++) {                                                                 \
                TYPE bits = data[i] & mask;                                                                        \
                none = (TYPE)(none + (bits == 0));                                                                 \
                below = (TYPE)(below + (bits < least));                                                            \
            }                                                                                                      \
            *zeros += none;                                                                                        \
            *small += below;                                                                                       \
        }                                                                                                          \
    }

FOR_EACH_WIDTH(BELOW, int16_t, 16)
FOR_EACH_WIDTH(BELOW, int32_t, 32)
FOR_EACH_WIDTH(BELOW, int64_t, 64)

void reduce_extremes(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high)
{
    if (bytes == 4)
        CHOOSE(extremes32)(memory, count, low, high);
    else if (bytes == 2)
        CHOOSE(extremes16)(memory, count, low, high);
    else
        CHOOSE(extremes64)(memory, count, low, high);
}

void reduce_below(const void *memory, size_t count, long bytes, int64_t limit, int64_t *zeros, int64_t *small)
{
    if (bytes == 4)
        CHOOSE(below32)(memory, count, limit, zeros, small);
    else if (bytes == 2)
        CHOOSE(below16)(memory, count, limit, zeros, small);
    else
        CHOOSE(below64)(memory, count, limit, zeros, small);
}

#define INTEGERS(TYPE, LEAST)                                                                      \
    static int integers_##TYPE(const void *memory, size_t count, int64_t *low, int64_t *high)      \
    {                                                                                              \
        const TYPE *data = memory;                                                                 \
        int64_t least = INT64_MAX, most = 0;                                                       \
        for (size_t i = 0; i < count; i++) {                                                       \
            if (LEAST < 0 && data[i] == (TYPE)(LEAST))                                             \
                return 0;                                                                          \
            const int64_t size = data[i] < 0 ? -(int64_t)data[i] : (int64_t)data[i];               \
            least = size < least ? size : least;                                                   \
            most = size > most ? size : most;                                                      \
        }                                                                                          \
        *low = least;                                                                              \
        *high = most;                                                                              \
        return 1;                                                                                  \
    }

INTEGERS(int8_t, INT8_MIN)
INTEGERS(uint8_t, 0)
INTEGERS(int16_t, INT16_MIN)
INTEGERS(int32_t, INT32_MIN)
INTEGERS(int64_t, INT64_MIN)

int reduce_integers(const void *memory, size_t count, long bytes, int is_signed, int64_t *low, int64_t *high)
{
    if (bytes == 8)
        return integers_int64_t(memory, count, low, high);
    if (bytes == 4)
        return integers_int32_t(memory, count, low, high);
    if (bytes == 2)
        return integers_int16_t(memory, count, low, high);
    return (is_signed ? integers_int8_t : integers_uint8_t)(memory, count, low, high);
}
