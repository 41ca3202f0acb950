/* Launches a kernel through the driver's cuLaunchKernel, of which Python gives the address: nothing is linked. The same build so
   runs where there is no driver.

   cuLaunchKernel copies the arguments before it returns. It launches in the context that is current in this thread, as torch has
   made it. An error is returned, and no exception is set: Triton then launches the kernel. */

#include "launches.h"

#include <string.h>

#include "objects.h"

enum { MOST_ARGUMENTS = 8, HIDDEN = 2, NOT_INITIALIZED = 3 };

/* LAUNCHED_KERNEL of worker/device/kernel_launcher.py, which has asked the driver for the parameters. Behind those that are
   given a kernel may have HIDDEN pointers for memory that it does not use. */
typedef struct {
    void *function;
    unsigned threads, shared, given;
    unsigned char sizes[MOST_ARGUMENTS];
} LaunchedKernel;

static int (*launch_kernel)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                            unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra);

PyObject *use_driver(PyObject *module, PyObject *address)
{
    void *found = PyLong_AsVoidPtr(address);
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    memcpy(&launch_kernel, &found, sizeof found); /* ISO C has no cast between the two kinds of pointers */
    Py_RETURN_NONE;
}

/* Whether each argument has as many bits as its parameter; 0 with an exception set. */
static int fit(const LaunchedKernel *kernel, unsigned long programs, const int64_t *values)
{
    for (unsigned i = 0; i < kernel->given; i++)
        if (kernel->sizes[i] == sizeof(int32_t) && values[i] != (int32_t)values[i])
            PyErr_SetString(PyExc_OverflowError, "expected an argument of 32 bits");
    if (!PyErr_Occurred() && (programs < 1 || programs > INT32_MAX))
        PyErr_SetString(PyExc_ValueError, "expected at least one program");
    return !PyErr_Occurred();
}

/* Returns the driver's error. A parameter of 4 bytes is the first half of its value. */
static int start(const LaunchedKernel *kernel, unsigned long programs, void *stream, int64_t *values)
{
    void *arguments[MOST_ARGUMENTS + HIDDEN];
    for (int i = 0; i < MOST_ARGUMENTS + HIDDEN; i++)
        arguments[i] = &values[i];
    if (launch_kernel == NULL)
        return NOT_INITIALIZED;
    /* It waits where very many launches are outstanding: a thread that waits with the GIL stops all others. Only
       memory of this function is used meanwhile. */
    PyThreadState *released = PyEval_SaveThread();
    const int error = launch_kernel(kernel->function, (unsigned)programs, 1, 1, kernel->threads, 1, 1, kernel->shared,
                                    stream, arguments, NULL);
    PyEval_RestoreThread(released);
    return error;
}

static int kernel_from(PyObject *bytes, LaunchedKernel *kernel)
{
    const int good = PyBytes_Check(bytes) && PyBytes_GET_SIZE(bytes) == sizeof *kernel;
    if (good)
        memcpy(kernel, PyBytes_AS_STRING(bytes), sizeof *kernel);
    return good;
}

PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    LaunchedKernel kernel;
    int64_t values[MOST_ARGUMENTS + HIDDEN] = {0};
    (void)module;
    if (given < 3 || !kernel_from(args[0], &kernel))
        return wrong("expected launch(kernel, programs, stream, argument, ...)");
    if (kernel.given > MOST_ARGUMENTS || given - 3 != (Py_ssize_t)kernel.given)
        return wrong("expected as many arguments as the kernel has parameters");
    const unsigned long programs = PyLong_AsUnsignedLong(args[1]);
    void *stream = PyLong_AsVoidPtr(args[2]);
    for (unsigned i = 0; i < kernel.given && !PyErr_Occurred(); i++)
        values[i] = PyLong_AsLongLong(args[3 + i]);
    if (PyErr_Occurred() || !fit(&kernel, programs, values))
        return NULL;
    return PyLong_FromLong(start(&kernel, programs, stream, values));
}

/* -- reads -------------------------------------------------------------------------------------------------------- */

enum { ALIGNED = 16 };
static const int64_t wide = INT64_C(1) << 31;

/* What is the same for all tensors that are read into rows side by side. */
typedef struct {
    PyObject *kernels, *stream_of, *stream, *device, *count; /* stream: its handle; NULL: stream_of(device) */
    int64_t inner, stride, rows, position;
} Reads;

typedef struct {
    PyObject *dtype; /* owned */
    int64_t address, elements;
} Source;

static int integer_by(PyObject *object, PyObject *method, int64_t *number)
{
    PyObject *found = PyObject_CallMethodNoArgs(object, method);
    *number = found != NULL ? PyLong_AsLongLong(found) : 0;
    Py_XDECREF(found);
    return !PyErr_Occurred();
}

/* 0 with an exception set */
static int source_of(PyObject *tensor, PyObject *elements, Source *source)
{
    source->elements = PyLong_AsLongLong(elements);
    source->dtype = NULL;
    if (PyErr_Occurred() || !integer_by(tensor, s_data_ptr, &source->address))
        return 0;
    source->dtype = PyObject_GetAttr(tensor, s_dtype);
    return source->dtype != NULL;
}

static PyObject *truth(int is_true)
{
    return is_true ? Py_True : Py_False;
}

/* `read_key` of worker/device/kernel_variants.py: NULL with an exception set. */
static PyObject *key_of(const Reads *reads, const Source *source)
{
    const int64_t inner = reads->stride != 0 ? reads->inner : source->elements;
    PyObject *sizes = Py_NewRef(Py_None);
    if (source->elements >= wide || inner >= wide || reads->stride >= wide)
        Py_SETREF(sizes, PyTuple_Pack(3, truth(source->elements < wide), truth(inner < wide), truth(reads->stride < wide)));
    PyObject *key = sizes != NULL ? PyTuple_Pack(7, source->dtype, reads->count, reads->device,
                                                 truth(source->address % ALIGNED == 0), truth(reads->rows % ALIGNED == 0),
                                                 truth(reads->stride == 0), sizes)
                                  : NULL;
    Py_XDECREF(sizes);
    return key;
}

/* Whether one launch may read both: see `read_two` of worker/device/kernel.py. */
static int are_alike(const Reads *reads, const Source *source, const Source *other)
{
    return reads->stride == 0 && source->dtype == other->dtype && source->elements < wide && other->elements < wide &&
           (source->address | other->address | reads->rows) % ALIGNED == 0;
}

/* Find the kernel of a key, which it takes over, the elements in a block, and the most programs for a tensor. 0 if there is
   none, or with an exception set. */
static int find_kernel(const Reads *reads, PyObject *key, LaunchedKernel *kernel, int64_t *block, int64_t *most)
{
    PyObject *known = key != NULL ? PyDict_GetItemWithError(reads->kernels, key) : NULL;
    Py_XDECREF(key);
    if (known == NULL)
        return 0;
    if (PyTuple_Check(known) && PyTuple_GET_SIZE(known) == 3 && kernel_from(PyTuple_GET_ITEM(known, 0), kernel) &&
        integer_from(PyTuple_GET_ITEM(known, 1), block) && integer_from(PyTuple_GET_ITEM(known, 2), most) && *block > 0)
        return 1;
    wrong("expected {key: (kernel, elements in a block, most programs)}");
    return 0;
}

static int64_t programs_for(int64_t elements, int64_t block, int64_t most)
{
    const int64_t asked = elements / block + (elements % block != 0);
    return asked < most ? asked : most;
}

/* Launch the kernel that reads a tensor, or this and the `other` one. 1; 0 if Triton must do it, or with an exception set. */
static int read_rows_from(const Reads *reads, const Source *source, const Source *other, Py_ssize_t at)
{
    LaunchedKernel kernel;
    int64_t block, most;
    PyObject *key = other != NULL ? PyTuple_Pack(4, s_two, source->dtype, reads->count, reads->device) : key_of(reads, source);
    if (!find_kernel(reads, key, &kernel, &block, &most))
        return 0;
    const int64_t first = programs_for(source->elements, block, most), row = reads->position + at;
    const int64_t others = other != NULL ? programs_for(other->elements, block, most) : 0;
    const int64_t inner = reads->stride != 0 ? reads->inner : source->elements;
    int64_t one[MOST_ARGUMENTS + HIDDEN] = {source->address, reads->rows, row, source->elements, inner, reads->stride};
    int64_t two[MOST_ARGUMENTS + HIDDEN] = {source->address, 0, reads->rows, row, source->elements, 0, first};
    if (other != NULL) {
        two[1] = other->address;
        two[5] = other->elements;
    }
    int64_t *values = other != NULL ? two : one;
    if (kernel.given != (other != NULL ? 7 : 6)) {
        wrong("expected as many arguments as the kernel has parameters");
        return 0;
    }
    if (!fit(&kernel, (unsigned long)(first + others), values))
        return 0;
    /* asked for each launch: the script may have made another stream the current one */
    PyObject *found = reads->stream != NULL ? Py_NewRef(reads->stream) : PyObject_CallOneArg(reads->stream_of, reads->device);
    void *stream = found != NULL ? PyLong_AsVoidPtr(found) : NULL;
    Py_XDECREF(found);
    return !PyErr_Occurred() && start(&kernel, (unsigned long)(first + others), stream, values) == 0;
}

/* Launch the kernel for a tensor, and for the `other` one, which may be NULL, where one launch can read both. Returns how many
   it reads, 0 if Triton must launch it, -1 with an exception set; `asked` is how many it is to read. */
static int read_next(const Reads *reads, const Source *source, const Source *other, Py_ssize_t at, int *asked)
{
    *asked = 1 + (other != NULL && are_alike(reads, source, other));
    const int done = *asked * read_rows_from(reads, source, *asked == 2 ? other : NULL, at);
    return PyErr_Occurred() ? -1 : done;
}

/* As read_next, for the tensors of a list from `at` on. */
static int read_listed(const Reads *reads, PyObject *tensors, PyObject *elements, Py_ssize_t at, int *asked)
{
    Source source = {NULL, 0, 0}, other = {NULL, 0, 0};
    const int has_other = at % 2 == 0 && at + 1 < PySequence_Fast_GET_SIZE(tensors);
    int done = -1;
    /* The items are borrowed: the lists are the caller's own, and stay as they are during the call. */
    if (source_of(PySequence_Fast_GET_ITEM(tensors, at), PySequence_Fast_GET_ITEM(elements, at), &source) &&
        (!has_other ||
         source_of(PySequence_Fast_GET_ITEM(tensors, at + 1), PySequence_Fast_GET_ITEM(elements, at + 1), &other)))
        done = read_next(reads, &source, has_other ? &other : NULL, at, asked);
    Py_XDECREF(source.dtype);
    Py_XDECREF(other.dtype);
    return done;
}

int launch_tensors(PyObject *kernels, PyObject *stream, PyObject *tensors, void *const *addresses, const int64_t *elements,
                   PyObject *rows, int64_t position, PyObject *count)
{
    Reads reads = {.kernels = kernels, .stream = stream, .count = count, .position = position};
    const int number = (int)PyList_GET_SIZE(tensors);
    Source sources[2];
    int at = 0, done = 1, asked = 0;
    if (PyDict_GET_SIZE(kernels) == 0)
        return 0;
    if (!integer_by(rows, s_data_ptr, &reads.rows) || (reads.device = PyObject_CallMethodNoArgs(rows, s_get_device)) == NULL)
        return -1;
    while (at < number && done > 0) {
        const int pair = at % 2 == 0 && at + 1 < number ? 2 : 1;
        int made = 0;
        for (; made < pair; made++) {
            PyObject *dtype = PyObject_GetAttr(PyList_GET_ITEM(tensors, at + made), s_dtype);
            if (dtype == NULL)
                break;
            sources[made] = (Source){dtype, (int64_t)(intptr_t)addresses[at + made], elements[at + made]};
        }
        done = made == pair ? read_next(&reads, &sources[0], pair == 2 ? &sources[1] : NULL, at, &asked) : -1;
        while (made > 0)
            Py_DECREF(sources[--made].dtype);
        at += done > 0 ? done : 0;
    }
    Py_DECREF(reads.device);
    return done < 0 ? -1 : at;
}

PyObject *launch_reads(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 10 || !PyDict_Check(args[0]) || !(PyList_Check(args[2]) || PyTuple_Check(args[2])) ||
        !(PyList_Check(args[3]) || PyTuple_Check(args[3])) ||
        PySequence_Fast_GET_SIZE(args[2]) != PySequence_Fast_GET_SIZE(args[3]) || !PyBool_Check(args[9]))
        return wrong("expected launch_reads(kernels, stream of, tensors, elements, at, inner, stride, rows, position, count)");
    Reads reads = {args[0], args[1], NULL, NULL, args[9], PyLong_AsLongLong(args[5]), PyLong_AsLongLong(args[6]),
                   0, PyLong_AsLongLong(args[8])};
    Py_ssize_t at = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred() || !integer_by(args[7], s_data_ptr, &reads.rows))
        return NULL;
    if ((reads.device = PyObject_CallMethodNoArgs(args[7], s_get_device)) == NULL)
        return NULL;
    int done = 1, asked = 0;
    while (at >= 0 && at < PySequence_Fast_GET_SIZE(args[2]) &&
           (done = read_listed(&reads, args[2], args[3], at, &asked)) > 0)
        at += done;
    Py_DECREF(reads.device);
    if (done < 0)
        return NULL;
    return done > 0 ? Py_NewRef(Py_None) : Py_BuildValue("(ni)", at, asked);
}
