/* The extension module gpuwatch.worker.native.recursion: how deep a thread may still call, which is what Python's
   recursion limit is about.

   torch takes one frame more for each module call once there is a global hook, and a hook takes frames of its own. A model
   that is nested as deep as the limit allows would fail with RecursionError under gpuwatch alone. So what gpuwatch takes
   is given back. sys.getrecursionlimit() and sys.setrecursionlimit() are as they are without gpuwatch.

   This file stands alone. It writes fields of PyThreadState that are no part of CPython's API: each release may rename
   them, and 3.11 and 3.12 did. With a release that has other fields, this module alone does not compile: the module core
   is built without it, and the launch says what is missing (launcher/life.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum {
    LEVEL = 1,  /* `inner` of torch.nn.Module._call_impl */
    AT_ONCE = 5, /* what a hook takes until it has called call_begins or work_begins; given while a module is running */
    WORK = 200, /* what a hook may take until it returns */
};

/* Per thread, as the depth that CPython counts is. */
static __thread int open_calls;

/* 3.10 counts the calls that are in progress. 3.11 counts those that are left. 3.12 has a limit of its own for calls of C:
   that one guards the thread's stack, which does not grow, and so nothing is given there. */
static void give(int frames)
{
    PyThreadState *thread = PyThreadState_Get();
#if PY_VERSION_HEX >= 0x030C0000
    thread->py_recursion_remaining += frames;
#elif PY_VERSION_HEX >= 0x030B0000
    thread->recursion_remaining += frames;
#else
    thread->recursion_depth -= frames;
#endif
}

static PyObject *call_begins(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    give((open_calls++ ? 0 : AT_ONCE) + LEVEL + WORK);
    Py_RETURN_NONE;
}

static PyObject *work_begins(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    give(WORK);
    Py_RETURN_NONE;
}

static PyObject *work_ends(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    give(-WORK);
    Py_RETURN_NONE;
}

static PyObject *call_ends(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    /* a KeyboardInterrupt leaves module calls without their forward hook; a hook that comes too often takes nothing */
    const int is_open = open_calls > 0;
    open_calls -= is_open;
    give(-WORK - (is_open ? LEVEL : 0) - (is_open && !open_calls ? AT_ONCE : 0));
    Py_RETURN_NONE;
}

static PyObject *first_frame(PyObject *module, PyObject *none)
{
    PyThreadState *thread = PyThreadState_Get();
    (void)module, (void)none;
    /* Until 3.11 a call of a C function counts as a frame, too. 3.12 counts frames of Python only. */
#if PY_VERSION_HEX >= 0x030C0000
    give(thread->py_recursion_limit - thread->py_recursion_remaining - 1);
#elif PY_VERSION_HEX >= 0x030B0000
    give(thread->recursion_limit - thread->recursion_remaining - 2);
#else
    give(thread->recursion_depth - 2);
#endif
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"call_begins", call_begins, METH_NOARGS, "A forward pre-hook has begun. Until `work_ends` it may take some frames."},
    {"work_begins", work_begins, METH_NOARGS, "A forward hook has begun. Until `call_ends` it may take some frames."},
    {"work_ends", work_ends, METH_NOARGS, "The pre-hook ends."},
    {"call_ends", call_ends, METH_NOARGS, "The forward hook ends."},
    {"first_frame", first_frame, METH_NOARGS, "The frames below the caller are ours: it is to be the first one."},
    {NULL, NULL, 0, NULL},
};

/* A subinterpreter would share `open_calls` with the main interpreter where one thread runs in both. A free-threaded Python
   need not turn the GIL on again for this module (PEP 703): each thread writes its own state only. */
static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT, .m_name = "recursion", .m_methods = methods,
                                        .m_slots = slots};

PyMODINIT_FUNC PyInit_recursion(void)
{
    return PyModuleDef_Init(&definition);
}
