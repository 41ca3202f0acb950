/* What becomes of an exception that this part of gpuwatch meets.

   A signal's handler runs at the next Python bytecode of the main thread. While a hook runs, that is a function of ours
   or of torch that C calls here. What the handler raises (a checkpoint at preemption, an alarm, Ctrl-C) is the script's, and
   must reach it. Only gpuwatch's own errors end here. core/signal_errors.py has the rule and its reasons.

   The way of a Ctrl-C that comes while a hook in C runs:
   1. CPython's handler in C notes the signal, and returns at once. C goes on: nothing interrupts it.
   2. If C calls no Python, the script's handler runs after the hook, in the next function of Python: one of the script's, or
      one of gpuwatch's, which asks the same rule.
   3. If C calls a function of Python, the handler runs in there, and the call returns NULL with KeyboardInterrupt set.
      The same holds for a call that waits for a lock, which asks for signals itself (PyErr_CheckSignals).
   4. `drop_error` keeps it. C cleans up: it may call more of CPython's API, which no exception may be set for.
   5. `settled` raises it as the function that Python or torch has called returns. torch hands it on to the script.
   In another thread than the main one no handler runs, so in a hook that runs there none of this happens. */

#include "errors.h"

static PyObject *rule; /* core/signal_errors.py: from_outside */

/* By thread, as CPython's own exception is: autograd calls hooks in several threads. A hook returns through `settled` in the
   thread that has called it, so none is left for another hook. */
static __thread PyObject *kept;

int find_rule(void)
{
    PyObject *module = PyImport_ImportModule("gpuwatch.core.signal_errors");
    if (module == NULL)
        return -1;
    Py_XSETREF(rule, PyObject_GetAttrString(module, "from_outside"));
    Py_DECREF(module);
    return rule == NULL ? -1 : 0;
}

/* Have this exception raised by `settled`. Takes it over. As in Python, an earlier one becomes its context. */
static void keep(PyObject *error)
{
    if (kept != NULL && kept != error)
        PyException_SetContext(error, Py_NewRef(kept));
    Py_XSETREF(kept, error);
}

/* Take the exception that is set, with its traceback. NULL if there is none. PyErr_GetRaisedException does this since 3.12;
   until 3.11 an exception may be set as a class and its arguments, and has its traceback apart. */
static PyObject *take_error(void)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    Py_DECREF(type);
    Py_XDECREF(trace);
    return error;
}

static void set_error(PyObject *error)
{
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
}

static int is_own(PyObject *error)
{
    if (!PyErr_GivenExceptionMatches(error, PyExc_Exception)) /* KeyboardInterrupt, SystemExit */
        return 0;
    PyObject *trace = PyException_GetTraceback(error);
    Py_XDECREF(trace);
    if (trace == NULL) /* raised by C: a handler is a function of Python, which leaves its line in the traceback */
        return 1;
    PyObject *answer = PyObject_CallOneArg(rule, error);
    if (answer == NULL && !PyErr_ExceptionMatches(PyExc_RecursionError) && !PyErr_ExceptionMatches(PyExc_MemoryError))
        keep(take_error()); /* another signal came while the rule was asked */
    PyErr_Clear(); /* the rule had no frame or no memory left: the error counts as gpuwatch's own */
    Py_XDECREF(answer);
    return answer != Py_True;
}

int is_own_error(void)
{
    PyObject *error = take_error();
    const int own = is_own(error);
    set_error(error);
    return own;
}

void drop_error(void)
{
    if (!PyErr_Occurred())
        return;
    PyObject *error = take_error();
    if (is_own(error))
        Py_DECREF(error);
    else
        keep(error);
}

int keeps_error(void)
{
    return kept != NULL;
}

PyObject *settled(PyObject *result)
{
    if (kept == NULL)
        return result;
    Py_XDECREF(result);
    PyObject *error = kept, *current = take_error();
    kept = NULL;
    if (current != NULL)
        PyException_SetContext(error, current);
    set_error(error);
    return NULL;
}
