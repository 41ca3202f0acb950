/* Gathers the rows of ordinary frames. frame_reads.c reads their numbers, and frame_store.c writes the frame. All of it
   works on the dictionaries of worker/hooks/ and worker/record/.

   A frame is ordinary if this code can read all of its tensors, and their numbers are finite and not near overflow. For
   any other frame it writes no frame and returns 0: then Python writes it. What it has noted by then holds all the same:
   parameters that have a hook now, a gradient that was read, values that a device fills in.

   Rules of CPython that hold in all of these files:
   - Arguments are borrowed: who calls holds them until the function returns. What is taken from them (an item of a list or a
     dictionary) is not held by the caller, and is gone if somebody replaces it while Python runs.
   - Before a call that may run Python, take a reference to every object that is used afterwards. Such calls are: Python
     functions; methods and getters that a script can override; and, until 3.11, any allocation, because gc may run in it.
   - No exception may be set while another function of CPython is called. See errors.c for what becomes of it. */

#include "frame_writer.h"

#include "frame_reads.h"
#include "frame_store.h"
#include "gradient_hooks.h"
#include "objects.h"
#include "rows.h"
#include "types.h"

static PyObject *answer(int taken)
{
    drop_error();
    return settled(PyBool_FromLong(taken));
}

/* -- a module call ---------------------------------------------------------------------------------------------- */

/* Call BackwardHooks.watch_parameter, unless the parameter is watched already or needs no gradient */
static int watch_parameter(FrameWriter *self, PyObject *parameter, PyObject *info, PyObject *name)
{
    PyObject *key = PyLong_FromVoidPtr(parameter);
    PyObject *known = key != NULL ? find(self->watched, key) : NULL;
    Py_XDECREF(key);
    drop_error();
    if (known != NULL && PyTuple_CheckExact(known) && is_ref_to(PyTuple_GET_ITEM(known, 0), parameter))
        return 1;
    if (truth_of(parameter, s_requires_grad) == 0)
        return 1;
    PyObject *done = PyObject_CallMethodObjArgs(self->gradients, s_watch_parameter, parameter, info, name, NULL);
    drop_error();
    Py_XDECREF(done);
    return done != NULL;
}

static int parameter_rows(FrameWriter *self, Frame *frame, PyObject *info, PyObject *slots, PyObject *module, int64_t step)
{
    /* Not PyObject_GetAttr. torch.nn.Module has a __getattr__ in Python, so its tp_getattro is CPython's slot_tp_getattr_hook:
       that looks for __getattribute__ and __getattr__ first, and calls the latter if the module has no `_parameters`, as one
       whose __init__ was not called. A module of the script may override both, to pass attributes of another module on.
       PyObject_GenericGetAttr, which is object.__getattribute__, reads the module's own dictionary and runs none of that. */
    PyObject *parameters = PyObject_GenericGetAttr(module, s__parameters), *name, *parameter;
    Py_ssize_t position = 0;
    int good = parameters != NULL && PyDict_CheckExact(parameters);
    while (good && PyDict_Next(parameters, &position, &name, &parameter)) {
        if (parameter == Py_None)
            continue;
        /* PyDict_Next borrows both, and allows no change of the dictionary's size. watch_parameter calls Python, which may
           register a parameter in another thread: then this loop may miss one, and is safe all the same. */
        Py_INCREF(name);
        Py_INCREF(parameter);
        good = (PyObject *)Py_TYPE(parameter) == self->parameter &&
               (!self->with_grads || watch_parameter(self, parameter, info, name)) &&
               (!self->with_weights || weight_row(self, frame, slots, name, parameter, step));
        Py_DECREF(name);
        Py_DECREF(parameter);
    }
    Py_XDECREF(parameters);
    return good;
}

static int argument_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *args, PyObject *kwargs)
{
    if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs) || PyTuple_GET_SIZE(args) > ROLES)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!leaf_rows(self, frame, slots, input_roles[i], PyTuple_GET_ITEM(args, i), 1, 0))
            return 0;
    PyObject *key, *leaf; /* borrowed. torch (Module._call_impl) has made this dictionary for the call, and hands it to hooks */
    Py_ssize_t position = 0;
    while (PyDict_Next(kwargs, &position, &key, &leaf)) {
        PyObject *role = find(self->kwargs, key);
        if (role == NULL || !leaf_rows(self, frame, slots, role, leaf, 1, 0))
            return 0;
    }
    return 1;
}

static int output_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *output)
{
    if (!PyTuple_CheckExact(output))
        return leaf_rows(self, frame, slots, output_role, output, 0, 1);
    if (PyTuple_GET_SIZE(output) > ROLES)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(output); i++)
        if (!leaf_rows(self, frame, slots, output_roles[i], PyTuple_GET_ITEM(output, i), 1, 1))
            return 0;
    return 1;
}

/* The arguments of the forward hook. */
typedef struct {
    PyObject *info, *module, *args, *kwargs, *output, *page;
    int64_t parent, depth, phase, step, seq;
} ModuleCall;

/* Write the frame of a module call. 1; 0 if it is left to Python; -1 with an exception set if its outputs could not be
   hooked after it was written. */
static int write_frame(FrameWriter *self, const ModuleCall *module_call)
{
    Frame frame;
    int64_t before;
    PyObject *info = module_call->info;
    Call call = {.parent = module_call->parent, .depth = module_call->depth, .phase = module_call->phase,
                 .rank_phase = -1, .rank_module = -1};
    if (!begin_frame(self, &frame) || !may_look(self))
        return 0;
    if (!integer_of(info, s_id, &call.module) || !integer_of(info, s_seq, &before))
        return 0;
    frame.seq = module_call->seq;
    call.collectives = before >= 0 && frame.seq > before ? frame.seq - before : 0;
    PyObject *slots = PyObject_GetAttr(info, s_slots);
    int taken = slots != NULL && PyDict_CheckExact(slots) &&
                parameter_rows(self, &frame, info, slots, module_call->module, module_call->step) &&
                (!self->forward || (argument_rows(self, &frame, slots, module_call->args, module_call->kwargs) &&
                                    output_rows(self, &frame, slots, module_call->output))) &&
                !PyErr_Occurred() && read_rows(self, &frame, module_call->step) &&
                make_memories(self, &frame, module_call->step) && store_frame(self, &frame, &call);
    drop_error();
    if (taken) { /* from here on the frame is in the file: Python must not write it again, whatever fails */
        remember(self, &frame);
        if (self->with_grads && self->forward && watch_outputs(self, &frame, info, module_call->page) < 0)
            taken = -1;
    }
    Py_XDECREF(slots);
    clear_frame(&frame);
    return taken;
}

static PyObject *writer_frame(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    int64_t numbers[5];
    if (given != 11)
        return wrong("expected frame(info, module, args, kwargs, output, page, parent, depth, phase, step, seq)");
    for (int i = 0; i < 5; i++)
        numbers[i] = PyLong_AsLongLong(args[6 + i]);
    if (PyErr_Occurred())
        return NULL;
    const ModuleCall call = {args[0],    args[1],    args[2],    args[3],    args[4], args[5],
                             numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
    const int taken = write_frame(self, &call);
    return taken < 0 ? settled(NULL) : answer(taken); /* the frame is written, and its outputs could not be hooked */
}

/* -- an optimizer step ------------------------------------------------------------------------------------------ */

static PyObject *writer_weights(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    Frame frame;
    Call call = {.parent = NOTHING, .phase = PHASE_OPTIMIZER, .rank_phase = -1, .rank_module = -1};
    if (given != 3 || !PyList_Check(args[1]))
        return wrong("expected weights(info, [(name, parameter), ...], step)");
    PyObject *info = args[0], *list = args[1];
    const int64_t step = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (!begin_frame(self, &frame) || !may_look(self) || !integer_of(info, s_id, &call.module) ||
        !issued_now(self, &frame.seq))
        return answer(0);
    PyObject *slots = PyObject_GetAttr(info, s_slots);
    int taken = slots != NULL && PyDict_CheckExact(slots);
    for (Py_ssize_t i = 0; taken && i < PyList_GET_SIZE(list); i++) {
        PyObject *pair = PyList_GET_ITEM(list, i);
        taken = PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2 &&
                weight_row(self, &frame, slots, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), step);
    }
    taken = taken && !PyErr_Occurred() && read_rows(self, &frame, step) && make_memories(self, &frame, step) &&
            store_frame(self, &frame, &call);
    drop_error();
    if (taken)
        remember(self, &frame);
    Py_XDECREF(slots);
    clear_frame(&frame);
    return answer(taken);
}

/* BackwardHooks.is_local */
static int is_local(FrameWriter *self, PyObject *gradient)
{
    int64_t version;
    PyObject *key = PyLong_FromVoidPtr(gradient);
    PyObject *known = key != NULL ? find(self->local, key) : NULL;
    Py_XDECREF(key);
    if (known == NULL || !PyTuple_CheckExact(known) || PyTuple_GET_SIZE(known) != 2 ||
        !is_ref_to(PyTuple_GET_ITEM(known, 0), gradient))
        return 0;
    const int64_t then = item(known, 1); /* before the getter of a subclass runs: `known` is borrowed */
    const int is_plain = (PyObject *)Py_TYPE(gradient) == self->tensor;
    return (is_plain ? version_of(self, gradient, &version) : integer_of(gradient, s__version, &version)) && then == version;
}

static PyObject *writer_all_local(FrameWriter *self, PyObject *parameters)
{
    if (!PyList_Check(parameters))
        return wrong("expected [(name, parameter), ...]");
    int local = may_look(self);
    for (Py_ssize_t i = 0; local && i < PyList_GET_SIZE(parameters); i++) {
        PyObject *pair = PyList_GET_ITEM(parameters, i);
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2)
            return answer(0);
        PyObject *gradient = PyObject_GetAttr(PyTuple_GET_ITEM(pair, 1), s_grad);
        if (gradient == NULL)
            return answer(0);
        local = gradient == Py_None || is_local(self, gradient);
        Py_DECREF(gradient);
    }
    return answer(local);
}

/* None for a tensor that is left to Python, and for what is no tensor */
static PyObject *writer_numbers(FrameWriter *self, PyObject *tensor)
{
    TensorView view;
    Numbers numbers;
    const int is_known = (PyObject *)Py_TYPE(tensor) == self->tensor || (PyObject *)Py_TYPE(tensor) == self->parameter;
    if (!is_known || !self->reads_host || !may_look(self) || !view_of(self->exchange, tensor, &view) || !is_plain(&view) ||
        is_in_storage(tensor, &view) != 1 || !read_plain(&view, &numbers))
        return settled(Py_NewRef(Py_None));
    return settled(with_integers(PyTuple_New(3), 0, &numbers.low, 3));
}

static PyObject *writer_hook(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 3 && given != 2)
        return wrong("expected hook(info, role[, page])");
    return new_gradient_hook(self, args[0], args[1], given == 3 ? args[2] : NULL);
}

/* -- its type --------------------------------------------------------------------------------------------------- */

/* The writer, the tables and the hooks refer to each other: only gc can free them. It subtracts what is visited here from each
   count: each reference that is owned, to an object that gc knows, is visited exactly once. */
static int writer_traverse(FrameWriter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
#define VISIT(NAME) Py_VISIT(self->NAME);
    EACH_OBJECT(VISIT)
    EACH_OPTIONAL(VISIT)
    Py_VISIT(self->version);
    return 0;
}

/* gc calls this for what is unreachable, and so no call is going on. A frame that is written afterwards finds no cursor, and
   `begin_frame` gives it up. */
static int writer_clear(FrameWriter *self)
{
    if (self->cell.obj != NULL)
        PyBuffer_Release(&self->cell);
    self->cell.buf = NULL;
#define CLEAR(NAME) Py_CLEAR(self->NAME);
    EACH_OBJECT(CLEAR)
    EACH_OPTIONAL(CLEAR)
    Py_CLEAR(self->version);
    return 0;
}

static void writer_dealloc(FrameWriter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    writer_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int expect(PyObject *object, int right, const char *expected)
{
    if (object != NULL && !right)
        PyErr_SetString(PyExc_TypeError, expected);
    return object != NULL && right;
}

/* From {dtype code: (bits from which on it is near overflow, bits of the largest number)}; 0 with an exception set */
static int set_near(FrameWriter *self, PyObject *near)
{
    for (int code = 0; code < FLOATS_END; code++) {
        long long from = INT64_MAX, to = 0;
        PyObject *key = PyLong_FromLong(code);
        PyObject *limits = key != NULL ? PyDict_GetItemWithError(near, key) : NULL;
        Py_XDECREF(key);
        if (PyErr_Occurred() || (limits != NULL && !PyArg_ParseTuple(limits, "LL", &from, &to)))
            return 0;
        self->near[code] = from;
        self->largest[code] = to;
    }
    return 1;
}

static int set_cursor(FrameWriter *self)
{
    if (PyObject_GetBuffer(self->cursor, &self->cell, PyBUF_WRITABLE) < 0)
        return 0;
    if (self->cell.len >= (Py_ssize_t)(3 * sizeof(int64_t)))
        return 1;
    PyErr_SetString(PyExc_ValueError, "no room in the cursor");
    return 0;
}

static int set_version(FrameWriter *self)
{
    PyObject *version = PyObject_GetAttr(self->tensor, s__version);
    /* version_of reads its fields: a property of Python's, or of another torch, is another object */
    const int is_in_c = version != NULL && Py_IS_TYPE(version, &PyGetSetDescr_Type);
    if (!expect(version, is_in_c, "Tensor._version must be computed in C")) {
        Py_XDECREF(version);
        return 0;
    }
    self->version = (PyGetSetDescrObject *)version;
    return 1;
}

/* The recorder's memory is borrowed anew for each frame: a map whose memory is lent could not be closed (BufferError). */
static int check_memory(FrameWriter *self)
{
    Py_buffer memory;
    if (PyObject_GetBuffer(self->memory, &memory, PyBUF_WRITABLE) < 0)
        return 0;
    PyBuffer_Release(&memory);
    return 1;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
#define NAME_OF(NAME) #NAME,
#define FORMAT_OF(NAME) "O"
#define PLACE_OF(NAME) &self->NAME,
#define HOLD(NAME) Py_XINCREF(self->NAME);
    static char *names[] = {EACH_OBJECT(NAME_OF) "exchange", "near", "forward", "with_weights", "with_grads",
                            EACH_OPTIONAL(NAME_OF) "reads_host", NULL};
    PyObject *exchange, *near;
    FrameWriter *self = (FrameWriter *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->reads_host = 1;
    const int parsed = PyArg_ParseTupleAndKeywords(args, kwargs, EACH_OBJECT(FORMAT_OF) "OOppp|" EACH_OPTIONAL(FORMAT_OF) "p", names,
                                                   EACH_OBJECT(PLACE_OF) &exchange, &near, &self->forward,
                                                   &self->with_weights, &self->with_grads,
                                                   EACH_OPTIONAL(PLACE_OF) &self->reads_host);
    /* The parser borrows. If it fails, some members are set and some NULL: each that is set gets its reference, which
       tp_dealloc gives back. */
    EACH_OBJECT(HOLD)
    EACH_OPTIONAL(HOLD)
#define NONE_TO_NULL(NAME)         \
    if (self->NAME == Py_None)     \
        Py_CLEAR(self->NAME);
    EACH_OPTIONAL(NONE_TO_NULL)
#define IS_DICT(NAME) expect(self->NAME, PyDict_CheckExact(self->NAME), #NAME " must be a dict")
    if (parsed && IS_DICT(seen) && IS_DICT(by_memory) && IS_DICT(weights) && IS_DICT(shapes) && IS_DICT(ignored) &&
        IS_DICT(watched) && IS_DICT(local) && IS_DICT(kwargs) && IS_DICT(compiler) &&
        expect(self->tensor, PyType_Check(self->tensor), "tensor must be a class") &&
        expect(self->numbers, PyType_Check(self->numbers), "numbers must be a class") &&
        expect(self->waiting, PyType_Check(self->waiting), "waiting must be a class") &&
        expect(near, PyDict_Check(near), "near must be a dict") && set_near(self, near) &&
        (self->exchange = exchange_of(exchange)) != NULL && check_memory(self) && set_cursor(self) && set_version(self))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef writer_methods[] = {
    {"frame", METHOD(writer_frame), METH_FASTCALL,
     "frame(info, module, args, kwargs, output, page, parent, depth, phase, step, seq) -> bool\n\n"
     "Write the frame of a module call into the open page `page`. `seq`: collectives issued. False if Python must write it."},
    {"weights", METHOD(writer_weights), METH_FASTCALL,
     "weights(info, [(name, parameter), ...], step) -> bool\n\n"
     "Write the frame of a module's weights after an optimizer step. False if Python must write it."},
    {"all_local", METHOD(writer_all_local), METH_O,
     "all_local([(name, parameter), ...]) -> bool\n\nWhether every gradient was recorded in the backward and has not "
     "changed since."},
    {"numbers", METHOD(writer_numbers), METH_O,
     "numbers(tensor) -> (low, high, meta) | None\n\nThe numbers of floats in host memory, all finite and without a gap. None if "
     "Python must read it."},
    {"hook", METHOD(writer_hook), METH_FASTCALL,
     "hook(info, role[, page]) -> hook\n\nThe hook for the gradient of an output; without a page, of a parameter."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "Writes ordinary frames: those of finite tensors in host memory that are not near overflow, of tensors\n"
                "on a device, and of tensors that were read before. For any other frame each method returns False,\n"
                "and no frame is written."},
    {Py_tp_new, writer_new}, {Py_tp_dealloc, writer_dealloc}, {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear}, {Py_tp_methods, writer_methods}, {0, NULL},
};
static PyType_Spec writer_spec = {"gpuwatch.worker.native.core.NativeFrameWriter", sizeof(FrameWriter), 0, TYPE_FLAGS,
                                  writer_slots};

int add_frame_writer(PyObject *module)
{
    PyTypeObject *type = add_type(module, "NativeFrameWriter", &writer_spec);
    Py_XDECREF(type);
    return type == NULL ? -1 : 0;
}
