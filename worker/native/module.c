/* The extension module gpuwatch.worker.native.core. It is optional: the Python code of worker/ can do all that it does.

   It is initialised in a single phase, and not as PEP 489 has it: its state stands in static variables of these files. There
   are the names that each call looks up, the types whose objects C makes, the rule of errors.c, and the functions of
   OpenMP and of the driver. torch itself is loaded once in a process, so there is one set of hooks. With two phases a second
   import (`del sys.modules[...]`) would make a second module, and replace the types of the first while its hooks
   are in use. In a single phase, with a size of -1, CPython makes the module once: a second import gets the same contents.
   An interpreter with a GIL of its own refuses such a module, which is right: the state is guarded by one. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Only the GIL guards that state, borrowed references and the recorder's pages. On a free-threaded Python
   (PEP 703) the import of a module that does not declare Py_MOD_GIL_NOT_USED turns the lock on, for all threads of the
   script. To declare it would be false. So this module is not built there, and Python does its work. */
#ifdef Py_GIL_DISABLED
#error "gpuwatch's part in C needs the GIL: on a free-threaded Python gpuwatch does without it"
#endif

#include "errors.h"
#include "frame_writer.h"
#include "gradient_hooks.h"
#include "graph_look.h"
#include "group_methods.h"
#include "issued.h"
#include "launches.h"
#include "layout.h"
#include "objects.h"
#include "readings.h"
#include "reductions.h"
#include "threads.h"
#include "types.h"
#include "writer_lock.h"

/* (address, count, what the elements are) of the arguments; 0 with an exception set */
static int memory_of(PyObject *const *args, void **memory, size_t *count, long *elements)
{
    *memory = PyLong_AsVoidPtr(args[0]);
    *count = PyLong_AsSize_t(args[1]);
    *elements = PyLong_AsLong(args[2]);
    return !PyErr_Occurred();
}

static PyObject *floats(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *memory;
    size_t count;
    long dtype;
    Numbers numbers;
    (void)module;
    if (given != 3)
        return wrong("expected read_floats(address, count, dtype)");
    if (!memory_of(args, &memory, &count, &dtype))
        return NULL;
    if (dtype <= 0 || dtype >= FLOATS_END)
        return wrong("expected the code of float32, float16, bfloat16 or float64");
    read_floats(memory, count, (uint8_t)dtype, &numbers);
    return with_integers(PyTuple_New(3), 0, &numbers.low, 3);
}

static PyObject *below(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *memory;
    size_t count;
    long bytes;
    int64_t found[2] = {0};
    (void)module;
    if (given != 4)
        return wrong("expected below(address, count, bytes, limit)");
    const int64_t limit = PyLong_AsLongLong(args[3]);
    if (!memory_of(args, &memory, &count, &bytes))
        return NULL;
    if (bytes != 4 && bytes != 2 && bytes != 8)
        return wrong("expected elements of 2, 4 or 8 bytes");
    reduce_below(memory, count, bytes, limit, &found[0], &found[1]);
    return with_integers(PyTuple_New(2), 0, found, 2);
}

static PyObject *may_be_notable(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    enum { ENCODINGS = 256 };
    const int64_t look_at = 0xFF | INT64_C(1) << 48; /* the flags, and core/values.py's COUNTED */
    Py_buffer values, limits;
    int found = 0;
    (void)module;
    if (given != 2)
        return wrong("expected may_be_notable(values, limits)");
    if (PyObject_GetBuffer(args[0], &values, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &limits, PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&values);
        return NULL;
    }
    const int64_t *value = values.buf, *end = value + values.len / (Py_ssize_t)sizeof *value / 3 * 3, *limit = limits.buf;
    if (limits.len == (Py_ssize_t)(ENCODINGS * sizeof *limit))
        for (; value < end && !found; value += 3)
            found = (value[2] & look_at) != 0 || value[1] >= limit[value[2] >> 8 & 0xFF];
    else
        wrong("expected a limit for each of 256 encodings");
    PyBuffer_Release(&values);
    PyBuffer_Release(&limits);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(found);
}

PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL || PyObject_SetAttrString(type, "__torch_unserializable__", Py_True) < 0 ||
        PyObject_SetAttrString(module, name, type) < 0) {
        Py_XDECREF(type);
        return NULL;
    }
    return (PyTypeObject *)type;
}

static int add_numbers(PyObject *module)
{
    PyObject *numbers = layout_numbers();
    const int failed = numbers == NULL || PyObject_SetAttrString(module, "LAYOUT", numbers) < 0;
    Py_XDECREF(numbers);
    return failed ? -1 : 0;
}

static PyMethodDef methods[] = {
    {"read_floats", METHOD(floats), METH_FASTCALL,
     "read_floats(address, count, dtype) -> (low, high, meta)\n\n"
     "The numbers of `count` floats (core/values.py), without the flags of non-finite ones. Raises TypeError."},
    {"below", METHOD(below), METH_FASTCALL,
     "below(address, count, bytes, limit) -> (zeros, small)\n\n"
     "Count the integers that are 0 and those below `limit` (0 included), with the sign bit cleared. Raises TypeError."},
    {"may_be_notable", METHOD(may_be_notable), METH_FASTCALL,
     "may_be_notable(values, limits) -> bool\n\n"
     "Whether one of the values, (n, 3) of int64 (low, high, meta), is non-finite, counted, or has a high from the limit\n"
     "of its encoding on. Raises TypeError and BufferError."},
    {"readings", METHOD(readings), METH_FASTCALL,
     "readings(exchange, types, waiting, at, tensors, earlier, device type, device id) -> (bytes, next)\n\n"
     "The entries of GroupedReadings (worker/device/grouped_readings.py) for the\n"
     "WaitingTensors from `at` on, up to the first whose entries\n"
     "Python must make: `next`. Tensors and earlier numbers are appended to the lists. Raises TypeError and ValueError."},
    {"tables", METHOD(tables), METH_FASTCALL,
     "tables(entries, share_of, most, rows) -> (bytes, [(variant, programs, bytes), ...])\n\n"
     "As `tables` of worker/device/kernel_variants.py. Raises TypeError and ValueError."},
    {"use_driver", use_driver, METH_O,
     "use_driver(address) -> None\n\n"
     "The address of the driver's cuLaunchKernel, or of a function with its parameters. Raises TypeError."},
    {"launch", METHOD(launch), METH_FASTCALL,
     "launch(kernel, programs, stream, argument, ...) -> int\n\n"
     "Launch a kernel (LAUNCHED_KERNEL of worker/device/kernel_launcher.py) with integers as its arguments. Returns the\n"
     "driver's error, 0 if there is none. Raises TypeError, ValueError and OverflowError, and launches nothing then."},
    {"launch_reads", METHOD(launch_reads), METH_FASTCALL,
     "launch_reads(kernels, stream of, tensors, elements, at, inner, stride, rows, position, count) -> (at, number) | None\n\n"
     "Read the tensors from `at` on into rows side by side, the first tensor into that at `position`. See\n"
     "`TritonReader` (worker/device/triton_reader.py). None: all are being read; else Triton must launch the kernel that\n"
     "reads the `number` tensors from `at` on. Raises TypeError, ValueError and OverflowError."},
    {"use_threads", METHOD(use_threads), METH_FASTCALL,
     "use_threads(parallel, most, is_parallel, thread, team) -> None\n\n"
     "Read large tensors with the threads of an OpenMP library. The arguments are the addresses of its GOMP_parallel,\n"
     "omp_get_max_threads, omp_in_parallel, omp_get_thread_num and omp_get_num_threads. Without arguments, the calling\n"
     "thread reads alone."},
    {"trace_hooks_as", trace_hooks_as, METH_O, "Have dynamo trace this Python function where it traces a hook of a gradient."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "core", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_core(void)
{
    choose_width();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (find_rule() < 0 || make_names() < 0 || add_numbers(module) < 0 || add_frame_writer(module) < 0 ||
                           add_gradient_hooks(module) < 0 || add_graph_look(module) < 0 || add_group_methods(module) < 0 ||
                           add_writer_lock(module) < 0 || add_issued(module) < 0))
        Py_CLEAR(module);
    return module;
}
