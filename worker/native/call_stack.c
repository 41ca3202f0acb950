/* Module calls on their way in and out: what worker/hooks/forward.py does for a known module inside of a root. */

#include "call_stack.h"

#include "frame_store.h"
#include "objects.h"

/* Whether a Python attribute is a weak reference to `object`. */
static int refers_to(PyObject *holder, PyObject *object)
{
    PyObject *ref = PyObject_GetAttr(holder, s_ref);
    const int same = ref != NULL && is_ref_to(ref, object);
    Py_XDECREF(ref);
    PyErr_Clear();
    return same;
}

/* Whether it is the stack of this thread's calls, `least` of them or more, and nothing is being compiled */
static int is_ours(FrameWriter *self, PyObject *stack, PyObject *thread, Py_ssize_t least)
{
    if (!PyList_CheckExact(stack) || PyList_GET_SIZE(stack) < least ||
        find(self->compiler, s__is_compiling_flag) != Py_False)
        return 0;
    const int same = PyLong_AsUnsignedLong(thread) == PyThread_get_thread_ident();
    PyErr_Clear();
    return same;
}

/* Whether torch traces (torch.jit.trace). Asked when a call is left: one that was entered meanwhile goes off the stack with
   the call around it. */
static int is_tracing(FrameWriter *self)
{
    PyObject *state = PyObject_CallNoArgs(self->tracing);
    Py_XDECREF(state);
    PyErr_Clear();
    return state != Py_None;
}

/* What is known of a module under the root of the stack: a reference, or NULL with no exception set */
static PyObject *info_of(PyObject *stack, PyObject *module)
{
    PyObject *first = PyList_GET_ITEM(stack, 0);
    PyObject *root = PyObject_GetAttr(first, s_root);
    PyObject *modules = root != NULL ? PyObject_GetAttr(root, s_modules) : NULL;
    PyObject *key = PyLong_FromVoidPtr(module), *info = NULL;
    if (modules != NULL && key != NULL && PyDict_CheckExact(modules))
        info = Py_XNewRef(find(modules, key));
    Py_XDECREF(root);
    Py_XDECREF(modules);
    Py_XDECREF(key);
    PyErr_Clear();
    if (info != NULL && (!refers_to(info, module) || truth_of(info, s_guessed) != 0))
        Py_CLEAR(info);
    return info;
}

PyObject *writer_enter(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    int64_t seq, id;
    if (given != 3)
        return wrong("expected enter(stack, module, thread)");
    PyObject *stack = args[0], *module = args[1];
    if (!is_ours(self, stack, args[2], 1) || refers_to(PyList_GET_ITEM(stack, 0), module))
        Py_RETURN_FALSE;
    PyObject *info = info_of(stack, module), *number = NULL;
    int entered = 0;
    if (info != NULL && truth_of(info, s_is_wrapper) == 0 && integer_of(info, s_id, &id) && issued_now(self, &seq)) {
        number = PyLong_FromLongLong(seq);
        entered = number != NULL && PyObject_SetAttr(info, s_seq, number) == 0 && PyList_Append(stack, info) == 0;
    }
    if (entered)
        say_module(self, id);
    Py_XDECREF(info);
    Py_XDECREF(number);
    PyErr_Clear();
    return PyBool_FromLong(entered);
}

/* The id of the module whose code made the innermost call: the nearest one that is not a wrapper. -1 if nobody knows. */
static int64_t parent_in(PyObject *stack)
{
    int64_t id = NOTHING;
    for (Py_ssize_t i = PyList_GET_SIZE(stack) - 2; i >= 0; i--) {
        const int is_wrapper = truth_of(PyList_GET_ITEM(stack, i), s_is_wrapper);
        if (is_wrapper == 0)
            return integer_of(PyList_GET_ITEM(stack, i), s_id, &id) ? id : -1;
        if (is_wrapper < 0)
            return -1;
    }
    return id;
}

/* The innermost call's frame, if it has one: 1, 0 if it is left to Python, or -1 with an exception set */
static int leave_with(FrameWriter *self, ModuleCall *call, PyObject *stack)
{
    PyObject *recorder = PyObject_GetAttr(self->progress, s_recorder);
    int taken = 0;
    call->page = recorder != NULL ? PyObject_GetAttr(recorder, s_page) : NULL;
    call->parent = parent_in(stack);
    call->depth = PyList_GET_SIZE(stack) - 1;
    if (call->page != NULL && call->page != Py_None && call->parent >= 0 &&
        integer_of(PyList_GET_ITEM(stack, call->depth - 1), s_id, &call->rank_module) &&
        integer_of(self->progress, s_step, &call->step))
        taken = write_frame(self, call);
    Py_XDECREF(recorder);
    Py_XDECREF(call->page);
    return taken;
}

PyObject *writer_leave(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 7)
        return wrong("expected leave(stack, module, args, kwargs, output, phase, thread)");
    PyObject *stack = args[0];
    ModuleCall call = {.module = args[1], .args = args[2], .kwargs = args[3], .output = args[4],
                       .phase = PyLong_AsLongLong(args[5])};
    if (PyErr_Occurred())
        return NULL;
    if (call.output == Py_None || !is_ours(self, stack, args[6], 2) || is_tracing(self))
        return PyLong_FromLong(0);
    const Py_ssize_t last = PyList_GET_SIZE(stack) - 1;
    call.info = Py_NewRef(PyList_GET_ITEM(stack, last));
    int result = 0;
    if (refers_to(call.info, call.module) && truth_of(call.info, s_is_wrapper) == 0 &&
        truth_of(call.info, s_watched) == 1) {
        const int taken = leave_with(self, &call, stack);
        result = taken == 0 ? -1 : 1;
        if (taken != 0 && PyList_GET_SIZE(stack) > last)
            PyList_SetSlice(stack, last, last + 1, NULL);
        if (taken < 0)
            result = -2;
    }
    Py_DECREF(call.info);
    if (result == -2)
        return NULL;
    PyErr_Clear();
    return PyLong_FromLong(result);
}

/* -- an optimizer's parameters ---------------------------------------------------------------------------------- */

/* Add (name, parameter) to the list of the module that holds it. 0 if nobody knows who that is. */
static int add_parameter(PyObject *found, PyObject *owners, PyObject *parameter)
{
    PyObject *key = PyLong_FromVoidPtr(parameter);
    PyObject *owner = key != NULL ? Py_XNewRef(find(owners, key)) : NULL;
    Py_XDECREF(key);
    int good = owner != NULL && PyTuple_CheckExact(owner) && PyTuple_GET_SIZE(owner) == 3 &&
               is_ref_to(PyTuple_GET_ITEM(owner, 0), parameter);
    const int watched = good ? truth_of(PyTuple_GET_ITEM(owner, 1), s_watched) : -1;
    good = watched >= 0;
    if (watched == 1) {
        PyObject *info = PyTuple_GET_ITEM(owner, 1), *held = PyDict_GetItemWithError(found, info);
        PyObject *pair = PyTuple_Pack(2, PyTuple_GET_ITEM(owner, 2), parameter);
        if (held == NULL && !PyErr_Occurred()) {
            held = PyList_New(0);
            good = held != NULL && PyDict_SetItem(found, info, held) == 0;
            Py_XDECREF(held); /* the dictionary holds it, or it is not used any more */
        }
        good = good && held != NULL && pair != NULL && PyList_Append(held, pair) == 0;
        Py_XDECREF(pair);
    }
    Py_XDECREF(owner);
    return good;
}

PyObject *writer_by_module(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    if (given != 2 || !PyList_Check(args[0]) || !PyDict_CheckExact(args[1]))
        return wrong("expected by_module(param_groups, owners)");
    PyObject *found = PyDict_New();
    int good = found != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *group = PyList_GET_ITEM(args[0], i);
        PyObject *parameters = PyDict_CheckExact(group) ? Py_XNewRef(find(group, s_params)) : NULL;
        good = parameters != NULL && PyList_Check(parameters);
        for (Py_ssize_t j = 0; good && j < PyList_GET_SIZE(parameters); j++)
            good = add_parameter(found, args[1], PyList_GET_ITEM(parameters, j));
        Py_XDECREF(parameters);
    }
    PyErr_Clear();
    if (good)
        return found;
    Py_XDECREF(found);
    Py_RETURN_NONE;
}
