/* How deep a thread may still call, which is what Python's recursion limit is about.

   torch takes one frame more for each module call once there is a global hook, and a hook takes frames of its own. A model
   that is nested as deep as the limit allows would fail with RecursionError under gpuwatch alone. So what gpuwatch takes
   is given back. sys.getrecursionlimit() and sys.setrecursionlimit() are as they are without gpuwatch. */

#include "recursion.h"

enum {
    LEVEL = 1,  /* `inner` of torch.nn.Module._call_impl */
    AT_ONCE = 5, /* what a hook takes until it has called call_begins or work_begins; given while a module is running */
    WORK = 200, /* what a hook may take until it returns */
};

static __thread int open_calls;

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

PyObject *call_begins(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    give((open_calls++ ? 0 : AT_ONCE) + LEVEL + WORK);
    Py_RETURN_NONE;
}

PyObject *work_begins(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    give(WORK);
    Py_RETURN_NONE;
}

PyObject *work_ends(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    give(-WORK);
    Py_RETURN_NONE;
}

PyObject *call_ends(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    /* a KeyboardInterrupt leaves module calls without their forward hook; a hook that comes too often takes nothing */
    const int is_open = open_calls > 0;
    open_calls -= is_open;
    give(-WORK - (is_open ? LEVEL : 0) - (is_open && !open_calls ? AT_ONCE : 0));
    Py_RETURN_NONE;
}

PyObject *first_frame(PyObject *module, PyObject *none)
{
    PyThreadState *thread = PyThreadState_Get();
    (void)module, (void)none;
#if PY_VERSION_HEX >= 0x030C0000
    give(thread->py_recursion_limit - thread->py_recursion_remaining - 1);
#elif PY_VERSION_HEX >= 0x030B0000
    give(thread->recursion_limit - thread->recursion_remaining - 2); /* this call counts, too */
#else
    give(thread->recursion_depth - 2);
#endif
    Py_RETURN_NONE;
}
