/* Records ordinary gradients of outputs and of parameters, as worker/hooks/gradient_frames.py records any.

   Rules of autograd:
   - It calls a hook in the thread that runs the node: on a device that is a thread of the engine (torch/csrc/autograd/engine.h,
     `start_device_threads`), and on the host the one that called backward(). Several threads of a script may do so at a
     time. It takes the GIL for the call (python_hook.cpp), so two hooks never run at once, but one may begin
     where another has released the lock.
   - What a hook raises ends the backward, and backward() raises it in the thread of the script.
   - A hook that returns None leaves the gradient as it is. These return nothing else.
   - torch holds a hook while it calls the hooks of a tensor, but Python may call one, too, and delete its attributes. So a
     call takes references to what it uses after others have run. */

#include "gradient_hooks.h"

#include <structmember.h>

#include "frame_reads.h"
#include "frame_store.h"
#include "objects.h"
#include "types.h"

typedef struct {
    PyObject_HEAD
    PyObject *writer, *gradients, *info, *role, *page;
} Hook;

static PyTypeObject *output_hook_type, *parameter_hook_type;

static int hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->writer);
    Py_VISIT(self->gradients);
    Py_VISIT(self->info);
    Py_VISIT(self->page);
    return 0;
}

/* For gc: breaks reference cycles through the writer and its tables. gc cannot see a cycle that runs through a tensor's
   graph, because torch holds its hooks from C++. Such a cycle ends when torch frees the graph. */
static int hook_clear(Hook *self)
{
    Py_CLEAR(self->writer);
    Py_CLEAR(self->gradients);
    Py_CLEAR(self->info);
    Py_CLEAR(self->role);
    Py_CLEAR(self->page);
    return 0;
}

static void hook_dealloc(Hook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

PyObject *new_gradient_hook(FrameWriter *writer, PyObject *info, PyObject *role, PyObject *page)
{
    PyTypeObject *type = page != NULL ? output_hook_type : parameter_hook_type;
    Hook *hook = (Hook *)type->tp_alloc(type, 0);
    if (hook != NULL) {
        hook->writer = Py_NewRef((PyObject *)writer);
        hook->gradients = Py_NewRef(writer->gradients);
        hook->info = Py_NewRef(info);
        hook->role = Py_NewRef(role);
        hook->page = Py_XNewRef(page);
    }
    return (PyObject *)hook;
}

/* -- what they see ---------------------------------------------------------------------------------------------- */

/* Enter a gradient that was read into BackwardHooks.local; 0 if that fails */
static int remember_local(FrameWriter *self, PyObject *gradient)
{
    int64_t version = 0;
    if (!version_of(self, gradient, &version) || version < 0)
        return 0;
    PyObject *ref = PyWeakref_NewRef(gradient, NULL);
    PyObject *memory = ref != NULL ? with_integers(PyTuple_New(2), 1, &version, 1) : NULL;
    if (memory != NULL)
        PyTuple_SET_ITEM(memory, 0, ref);
    else
        Py_XDECREF(ref);
    PyObject *key = PyLong_FromVoidPtr(gradient);
    const int good = memory != NULL && key != NULL && PyDict_SetItem(self->local, key, memory) == 0;
    Py_XDECREF(memory);
    Py_XDECREF(key);
    return good;
}

/* Whether the gradient of a parameter may be read when the backward ends: no other hook gets it before. The hooks that
   register_post_accumulate_grad_hook puts in run once `.grad` has its value, and may change it: an optimizer in the backward
   does, and sets it to None. */
static int may_wait(Hook *self, PyObject *parameter)
{
    if (truth_of(self->gradients, s_waits) != 1)
        return 0;
    PyObject *hooks = PyObject_GetAttr(parameter, s__post_accumulate_grad_hooks);
    const int alone = hooks != NULL && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 1;
    Py_XDECREF(hooks);
    return alone;
}

/* BackwardHooks.take for an ordinary gradient: 1 if its frame was written, 0 if it is left to Python. `parameter`: whose it is,
   NULL for the gradient of an output */
static int take_gradient(FrameWriter *self, Hook *hook, PyObject *page, PyObject *gradient, PyObject *parameter)
{
    Frame frame;
    Call call = {.parent = NOTHING, .phase = PHASE_BACKWARD, .rank_phase = RANK_BACKWARD};
    int64_t number;
    const int is_local = parameter != NULL;
    /* the last: gc may have cleared the writer */
    if ((PyObject *)Py_TYPE(gradient) != self->tensor || !begin_frame(self, &frame) ||
        hook->gradients != self->gradients)
        return 0;
    if (!integer_of(page, s_number, &number) || number != frame.page || !integer_of(hook->info, s_id, &call.module))
        return 0;
    const int scaled = truth_of(self->gradients, s_scaled), rehearsed = truth_of(page, s_rehearses);
    /* for a parameter, take_parameter has asked may_look already */
    if (scaled < 0 || rehearsed < 0 || (!is_local && !may_look(self)) || !issued_now(self, &frame.seq))
        return 0;
    const int mark = (scaled ? MARK_SCALED : 0) | (rehearsed ? MARK_REHEARSED : 0);
    call.rank_module = call.module;
    PyObject *slots = PyObject_GetAttr(hook->info, s_slots);
    int taken = slots != NULL && PyDict_CheckExact(slots) &&
                gradient_row(self, &frame, slots, hook->role, gradient, mark);
    /* in host memory it is read at once */
    frame.may_wait = taken && is_local && frame.rows[0].on_device && may_wait(hook, parameter);
    taken = taken && read_rows(self, &frame, 0) &&
            (is_local ? remember_local(self, gradient) : PyObject_SetAttr(self->gradients, s__page, page) == 0) &&
            store_frame(self, &frame, &call);
    drop_error();
    Py_XDECREF(slots);
    clear_frame(&frame);
    return taken;
}

/* BackwardHooks.of_parameter for an ordinary gradient: 1, or 0 if it is left to Python */
static int take_parameter(Hook *self, PyObject *parameter)
{
    FrameWriter *writer = (FrameWriter *)self->writer;
    PyObject *gradient = NULL, *before = NULL, *page = NULL, *root = NULL;
    int taken = 0;
    if (truth_of(writer->progress, s_skipped) == 1)
        return 1; /* nothing of it is recorded */
    if (truth_of(self->gradients, s__attached) != 1 || !may_look(writer))
        return 0;
    before = PyObject_GetAttr(self->gradients, s_before_parameter);
    if (before != NULL && before != Py_None) { /* it writes the frames of a compiled backward, which come first */
        PyObject *done = PyObject_CallOneArg(before, self->info);
        Py_XDECREF(done);
        if (done == NULL)
            goto done;
    }
    gradient = PyObject_GetAttr(parameter, s_grad);
    page = PyObject_GetAttr(self->gradients, s__page);
    if (gradient == NULL || gradient == Py_None || page == NULL)
        goto done;
    if (page == Py_None) {
        root = PyObject_GetAttr(self->info, s_root);
        Py_CLEAR(page);
        page = root != NULL ? PyObject_GetAttr(root, s_page) : NULL;
    }
    if (page != NULL && page != Py_None)
        taken = take_gradient(writer, self, page, gradient, parameter);
done:
    drop_error();
    Py_XDECREF(gradient);
    Py_XDECREF(before);
    Py_XDECREF(page);
    Py_XDECREF(root);
    return taken;
}

static int one_argument(PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) == 1 && (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0))
        return 1;
    PyErr_SetString(PyExc_TypeError, "expected one tensor");
    return 0;
}

static PyObject *nothing_of(PyObject *result)
{
    if (result == NULL)
        return NULL;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

static PyObject *output_hook_call(Hook *self, PyObject *args, PyObject *kwargs)
{
    if (!one_argument(args, kwargs))
        return NULL;
    PyObject *gradient = PyTuple_GET_ITEM(args, 0), *page = self->page, *result;
    if (self->writer == NULL || self->info == NULL || self->role == NULL || page == NULL)
        Py_RETURN_NONE;
    Py_INCREF(self); /* a callback may remove the hook from its tensor, and Python may delete its page, while this runs */
    Py_INCREF(page);
    if (truth_of(self->gradients, s__attached) == 1 && take_gradient((FrameWriter *)self->writer, self, page, gradient, NULL))
        result = Py_NewRef(Py_None);
    else if (keeps_error()) /* a signal's handler has raised: Python would run more code before the script gets it */
        result = NULL;
    else
        result = nothing_of(PyObject_CallMethodObjArgs(self->gradients, s_of_output, self->info, self->role, page,
                                                       gradient, NULL));
    Py_DECREF(page);
    Py_DECREF(self);
    return settled(result);
}

static PyObject *parameter_hook_call(Hook *self, PyObject *args, PyObject *kwargs)
{
    if (!one_argument(args, kwargs))
        return NULL;
    PyObject *parameter = PyTuple_GET_ITEM(args, 0), *result;
    if (self->writer == NULL || self->info == NULL || self->role == NULL)
        Py_RETURN_NONE;
    Py_INCREF(self);
    if (take_parameter(self, parameter))
        result = Py_NewRef(Py_None);
    else if (keeps_error())
        result = NULL;
    else
        result = nothing_of(PyObject_CallMethodObjArgs(self->gradients, s_of_parameter, self->info, self->role,
                                                       parameter, NULL));
    Py_DECREF(self);
    return settled(result);
}

/* -- putting them in -------------------------------------------------------------------------------------------- */

/* A number for a hook, from the count that RemovableHandle has for all tensors. Many are taken from it at once: each change of
   a class makes CPython look up its attributes anew. NULL if that fails. */
static PyObject *hook_number(FrameWriter *self)
{
    enum { AT_ONCE = 256 };
    if (self->next_hook == self->hooks_end) {
        int64_t next;
        if (!integer_of(self->handle, s_next_id, &next))
            return NULL;
        PyObject *end = PyLong_FromLongLong(next + AT_ONCE);
        const int taken = end != NULL && PyObject_SetAttr(self->handle, s_next_id, end) == 0;
        Py_XDECREF(end);
        if (!taken)
            return NULL;
        self->next_hook = next;
        self->hooks_end = next + AT_ONCE;
    }
    return PyLong_FromLongLong(self->next_hook++);
}

/* Tensor.register_hook, without the handle that nobody would keep. 0 if it is left to it.

   As in torch/_tensor.py: the tensor gets a dictionary of hooks, and the node that made it learns of the dictionary
   (`_register_hook_dict`), because autograd calls the hooks of nodes. A number names each hook: the script's handles remove
   by these numbers, and must not meet ours. A tensor that has a dictionary already is left to register_hook itself.
   `function`: its grad_fn. */
static int watch_output(FrameWriter *self, PyObject *info, PyObject *role, PyObject *tensor, PyObject *function,
                        PyObject *page)
{
    PyObject *dict = NULL, *number = NULL, *hook = NULL, *done = NULL;
    int good = 0;
    PyObject *hooks = PyObject_GetAttr(tensor, s__backward_hooks);
    if (hooks != Py_None)
        goto end;
    dict = PyObject_CallNoArgs(self->hook_dict);
    hook = new_gradient_hook(self, info, role, page);
    number = dict != NULL && hook != NULL ? hook_number(self) : NULL;
    if (number == NULL || PyObject_SetItem(dict, number, hook) < 0)
        goto end;
    if (PyObject_SetAttr(tensor, s__backward_hooks, dict) < 0)
        goto end;
    done = PyObject_CallMethodObjArgs(function, s__register_hook_dict, tensor, NULL);
    good = done != NULL;
    if (!good) { /* else Tensor.register_hook would take the node for one that knows of the dictionary */
        drop_error();
        if (PyObject_SetAttr(tensor, s__backward_hooks, Py_None) < 0)
            drop_error();
    }
end:
    drop_error();
    Py_XDECREF(hooks);
    Py_XDECREF(dict);
    Py_XDECREF(number);
    Py_XDECREF(hook);
    Py_XDECREF(done);
    return good;
}

/* "grad output[1]" of "output[1]": a reference, or NULL with an exception set */
static PyObject *grad_role_of(PyObject *role)
{
    if (role == output_role)
        return Py_NewRef(grad_output_role);
    for (int i = 0; i < ROLES; i++)
        if (role == output_roles[i])
            return Py_NewRef(grad_output_roles[i]);
    return PyUnicode_FromFormat("grad %U", role);
}

int watch_outputs(FrameWriter *self, Frame *frame, PyObject *info, PyObject *page)
{
    for (int i = 0; i < frame->used; i++) {
        Row *row = &frame->rows[i];
        if (!row->is_output || !row->is_new)
            continue;
        PyObject *function = PyObject_GetAttr(row->object, s_grad_fn);
        if (function == Py_None) { /* a leaf has no node: its gradient comes to the hook of a parameter, or to nobody */
            Py_DECREF(function);
            continue;
        }
        PyObject *role = function != NULL ? grad_role_of(row->role) : NULL;
        const int watched = role != NULL && watch_output(self, info, role, row->object, function, page);
        drop_error();
        Py_XDECREF(role);
        Py_XDECREF(function);
        if (keeps_error()) {
            settled(NULL); /* raises it */
            return -1;
        }
        if (watched)
            continue;
        PyObject *done = PyObject_CallMethodObjArgs(self->gradients, s_watch_output, info, row->role, row->object, page,
                                                    NULL);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    return 0;
}

/* -- their types ------------------------------------------------------------------------------------------------ */

static PyMemberDef hook_members[] = {
    {"gradients", T_OBJECT, offsetof(Hook, gradients), READONLY, NULL},
    {"info", T_OBJECT, offsetof(Hook, info), 0, NULL},
    {"role", T_OBJECT, offsetof(Hook, role), 0, NULL},
    {"page", T_OBJECT, offsetof(Hook, page), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define HOOK_SLOTS(CALL)                                                                              \
    {Py_tp_call, CALL}, {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse},               \
    {Py_tp_clear, hook_clear}, {Py_tp_members, hook_members}, {0, NULL}
static PyType_Slot output_hook_slots[] = {HOOK_SLOTS(output_hook_call)};
static PyType_Slot parameter_hook_slots[] = {HOOK_SLOTS(parameter_hook_call)};

#define HOOK_FLAGS (TYPE_FLAGS | Py_TPFLAGS_DISALLOW_INSTANTIATION)
static PyType_Spec output_hook_spec = {"gpuwatch.worker.native.core.OutputHook", sizeof(Hook), 0, HOOK_FLAGS,
                                       output_hook_slots};
static PyType_Spec parameter_hook_spec = {"gpuwatch.worker.native.core.ParameterHook", sizeof(Hook), 0, HOOK_FLAGS,
                                          parameter_hook_slots};

/* Have dynamo trace a function of Python in place of our hooks in C. Dynamo looks up `__call__` on the type, and breaks the
   graph if that is no function of Python: so `__call__` is set. CPython then also replaces tp_call, the slot that ordinary
   calls use (type.__setattr__, update_slot): the old one is put back, so that eager calls stay in C. PyType_Modified empties
   CPython's cache of what it has looked up in the type. */
PyObject *trace_hooks_as(PyObject *module, PyObject *function)
{
    PyTypeObject *types[] = {output_hook_type, parameter_hook_type};
    (void)module;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const ternaryfunc call = types[i]->tp_call;
        if (PyObject_SetAttrString((PyObject *)types[i], "__call__", function) < 0)
            return NULL;
        types[i]->tp_call = call;
        PyType_Modified(types[i]);
    }
    Py_RETURN_NONE;
}

int add_gradient_hooks(PyObject *module)
{
    output_hook_type = add_type(module, "OutputHook", &output_hook_spec);
    parameter_hook_type = add_type(module, "ParameterHook", &parameter_hook_spec);
    return output_hook_type == NULL || parameter_hook_type == NULL ? -1 : 0;
}
