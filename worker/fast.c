/* The inner loops over a tensor's bits, each in one pass. worker/bits.py has them in NumPy too, for where this was not
   built.

   A float's bits with the sign cleared sort as integers: see core/values.py. The addresses are those of host memory
   that the caller keeps alive. Nothing is allocated and no thread is started. The interpreter's lock is kept: at the
   speed of memory the largest tensors take some milliseconds, and to get the lock back can take as long. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>

/* Each loop is compiled for the wide registers, too, which of them is there is asked at run time. */
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

static int width = 0;

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

/* In blocks whose counts fit the element's own type: that many can be added up in one register. */
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

static PyObject *pair(int64_t first, int64_t second)
{
    PyObject *tuple = PyTuple_New(2);
    if (tuple == NULL)
        return NULL;
    PyObject *one = PyLong_FromLongLong(first), *other = PyLong_FromLongLong(second);
    if (one == NULL || other == NULL) {
        Py_XDECREF(one);
        Py_XDECREF(other);
        Py_DECREF(tuple);
        return NULL;
    }
    PyTuple_SetItem(tuple, 0, one);
    PyTuple_SetItem(tuple, 1, other);
    return tuple;
}

/* (address, count, bytes per element) of the arguments; -1 with an exception set */
static int memory_of(PyObject *const *args, void **memory, size_t *count, long *bytes)
{
    *memory = PyLong_AsVoidPtr(args[0]);
    *count = PyLong_AsSize_t(args[1]);
    *bytes = PyLong_AsLong(args[2]);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *wrong(const char *expected)
{
    PyErr_SetString(PyExc_TypeError, expected);
    return NULL;
}

static PyObject *extremes(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *memory;
    size_t count;
    long bytes;
    int64_t low = 0, high = 0;
    if (given != 3)
        return wrong("expected extremes(address, count, bytes)");
    if (memory_of(args, &memory, &count, &bytes) < 0)
        return NULL;
    if (bytes == 4)
        CHOOSE(extremes32)(memory, count, &low, &high);
    else if (bytes == 2)
        CHOOSE(extremes16)(memory, count, &low, &high);
    else if (bytes == 8)
        CHOOSE(extremes64)(memory, count, &low, &high);
    else
        return wrong("expected elements of 2, 4 or 8 bytes");
    return pair(low, high);
}

static PyObject *below(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *memory;
    size_t count;
    long bytes;
    int64_t zeros = 0, small = 0;
    if (given != 4)
        return wrong("expected below(address, count, bytes, limit)");
    const int64_t limit = PyLong_AsLongLong(args[3]);
    if (memory_of(args, &memory, &count, &bytes) < 0)
        return NULL;
    if (bytes == 4)
        CHOOSE(below32)(memory, count, limit, &zeros, &small);
    else if (bytes == 2)
        CHOOSE(below16)(memory, count, limit, &zeros, &small);
    else if (bytes == 8)
        CHOOSE(below64)(memory, count, limit, &zeros, &small);
    else
        return wrong("expected elements of 2, 4 or 8 bytes");
    return pair(zeros, small);
}

static PyMethodDef methods[] = {
    {"extremes", (PyCFunction)(void (*)(void))extremes, METH_FASTCALL,
     "extremes(address, count, bytes) -> (low, high)\n\n"
     "Smallest and largest of `count` signed integers of `bytes` bytes each, the sign bit cleared. Raises TypeError."},
    {"below", (PyCFunction)(void (*)(void))below, METH_FASTCALL,
     "below(address, count, bytes, limit) -> (zeros, small)\n\n"
     "How many are zero, and how many below `limit` (zeros too), the sign bit cleared. Raises TypeError."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fast", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_fast(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        width = 1;
    if (width && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        width = 2;
#endif
    return PyModule_Create(&definition);
}
