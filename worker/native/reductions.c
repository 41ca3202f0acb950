/* The loops over bits. Each is also compiled for wide registers, and chosen by the processor at run time.

   IEEE 754 (and bfloat16, the upper half of a float32) orders positive floats as it orders their bits, inf and nan above all
   others. So with the sign cleared the largest integer is the largest number, and tells whether one is not finite. A
   comparison of floats is false for nan: a loop over floats would need a test of each element. */

#include "reductions.h"

#include "layout.h"
#include "threads.h"

/* What a pass over floats finds. A new statistic is a field here, and has its part in EXTREMES, `merge` and `read_floats`. */
typedef struct {
    int64_t low, high; /* with the sign bit cleared. Of no floats at all: the largest number of the type, and 0 */
} Reading;

static void merge(Reading *all, const Reading *part)
{
    all->low = part->low < all->low ? part->low : all->low;
    all->high = part->high > all->high ? part->high : all->high;
}

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
    __builtin_cpu_init(); /* gcc: needed before __builtin_cpu_supports, which asks the processor and the system */
    if (__builtin_cpu_supports("avx2"))
        width = 1;
    if (width && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        width = 2;
#endif
}

#define EXTREMES(TYPE, BITS, NAME, TARGET)                                                                  \
    TARGET static void extremes##BITS##_##NAME(const void *memory, size_t count, Reading *found)            \
    {                                                                                                       \
        const TYPE *data = memory;                                                                          \
        const TYPE mask = INT##BITS##_MAX;                                                                  \
        TYPE least = mask, most = 0;                                                                        \
        for (size_t i = 0; i < count; i++) {                                                                \
            TYPE bits = data[i] & mask;                                                                     \
            least = bits < least ? bits : least;                                                            \
            most = bits > most ? bits : most;                                                               \
        }                                                                                                   \
        *found = (Reading){.low = least, .high = most};                                                     \
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

static void reduce(const void *memory, size_t count, uint8_t dtype, Reading *found)
{
    if (float_bytes[dtype] == 4)
        CHOOSE(extremes32)(memory, count, found);
    else if (float_bytes[dtype] == 2)
        CHOOSE(extremes16)(memory, count, found);
    else
        CHOOSE(extremes64)(memory, count, found);
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
    static int integers_##TYPE(const void *memory, size_t count, Numbers *numbers)                 \
    {                                                                                              \
        const TYPE *data = memory;                                                                 \
        int64_t least = INT64_MAX, most = 0;                                                       \
        for (size_t i = 0; i < count; i++) {                                                       \
            if (LEAST < 0 && data[i] == (TYPE)(LEAST)) /* -INT64_MIN is no int64_t: undefined in C */ \
                return 0;                                                                          \
            const int64_t size = data[i] < 0 ? -(int64_t)data[i] : (int64_t)data[i];               \
            least = size < least ? size : least;                                                   \
            most = size > most ? size : most;                                                      \
        }                                                                                          \
        *numbers = (Numbers){least, most, ENCODING_INTEGER << 8};                                  \
        return 1;                                                                                  \
    }

INTEGERS(int8_t, INT8_MIN)
INTEGERS(uint8_t, 0)
INTEGERS(int16_t, INT16_MIN)
INTEGERS(int32_t, INT32_MIN)
INTEGERS(int64_t, INT64_MIN)

/* -- whole tensors ---------------------------------------------------------------------------------------------- */

typedef struct {
    const char *memory;
    uint8_t dtype;
    struct { Reading reading; char apart[64]; } found[MOST_PARTS]; /* two threads that write into one line of cache wait */
} Parts;

static void read_part(void *about, int part, size_t first, size_t count)
{
    Parts *parts = about;
    reduce(parts->memory + first * (size_t)float_bytes[parts->dtype], count, parts->dtype, &parts->found[part].reading);
}

void read_floats(const void *memory, size_t count, uint8_t dtype, Numbers *numbers)
{
    Parts parts;
    parts.memory = memory;
    parts.dtype = dtype;
    const int number = read_parts(count, float_bytes[dtype], read_part, &parts);
    Reading all = parts.found[0].reading;
    for (int i = 1; i < number; i++)
        merge(&all, &parts.found[i].reading);
    *numbers = (Numbers){all.low, all.high, encodings[dtype] << 8};
}

int read_plain(const TensorView *view, Numbers *numbers)
{
    const size_t count = (size_t)view->count;
    if (view->dtype < FLOATS_END) {
        read_floats(view->address, count, view->dtype, numbers);
        return numbers->high < inf_bits[view->dtype];
    }
    return (view->dtype == DTYPE_INT64   ? integers_int64_t
            : view->dtype == DTYPE_INT32 ? integers_int32_t
            : view->dtype == DTYPE_INT16 ? integers_int16_t
            : view->dtype == DTYPE_INT8  ? integers_int8_t
                                         : integers_uint8_t)(view->address, count, numbers); /* uint8, bool */
}

int64_t largest_of(const TensorView *view)
{
    Reading found;
    reduce(view->address, (size_t)view->count, view->dtype, &found);
    return found.high;
}
