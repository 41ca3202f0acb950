/* Replaced methods of torch's classes. Each is a C function bound like pybind11's own: it has no frame, so no traceback of
   the user's shows it, and pybind11 does not take it for a method that a subclass in Python has overridden.

   - pybind11 binds a method as an instancemethod (PyInstanceMethod_New) around a function in C: a plain function in C would not
     get the object as its first argument.
   - Where C++ calls a virtual method, pybind11 looks whether Python has overridden it (get_type_override). It takes a function in
     C for its own (is_cpp_function, PyCFunction_Check); one in Python would be called by C++ again, without end.
   - CPython keeps a pointer to the PyMethodDef of a function, and to its texts. They lie in the GroupMethod, which is the function's
     `self`: it lives as long as the function.
   - pybind11 releases the GIL in many methods: other threads call others meanwhile. What a call notes is on its own
     stack, in `place`. */

#include "group_methods.h"

#include "group_look.h"
#include "group_writer.h"
#include "objects.h"
#include "pending_works.h"
#include "types.h"

typedef struct {
    PyObject_HEAD
    GroupWriter *writer;
    PyObject *before, *name, *doc; /* before: the method that it calls */
    int call, is_rooted, given_at_root, returned_at_root; /* at root: no other rank gives, or is given, anything */
    int64_t operation;
    Py_ssize_t tensor, peer, tag, given, returned; /* positions of arguments, without the object; -1: none */
    PyMethodDef definition;
} GroupMethod;

static PyTypeObject *method_type;

/* -- one call --------------------------------------------------------------------------------------------------- */

/* By thread: an operation of another thread is another operation, also if it begins meanwhile. */
_Thread_local int calls_inside;

void tell_fault(GroupWriter *self)
{
    PyObject *type, *value, *trace;
    if (!is_own_error()) {
        drop_error();
        return;
    }
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *done = value != NULL && self->on_fault != NULL ? PyObject_CallOneArg(self->on_fault, value) : NULL;
    if (done == NULL)
        drop_error();
    Py_XDECREF(done);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* The first of several tensors, borrowed; NULL for none. */
static PyObject *first_of(PyObject *tensors)
{
    while (PyList_CheckExact(tensors)) {
        if (PyList_GET_SIZE(tensors) == 0)
            return NULL;
        tensors = PyList_GET_ITEM(tensors, 0);
    }
    return tensors;
}

/* The rank of the root, in the options that come last; -1 if it is not known. */
static int64_t root_of(PyObject *options)
{
    int64_t root;
    return integer_of(options, s_rootRank, &root) ? root : -1;
}

static int64_t integer_at(PyObject *const *args, Py_ssize_t given, Py_ssize_t position, int64_t otherwise)
{
    int64_t number;
    return position >= 0 && position + 1 < given && integer_from(args[position + 1], &number) ? number : otherwise;
}

/* Read the inputs, and remember the output tensors. -1 with an exception set. */
static int look_at_inputs(GroupMethod *self, PyObject *const *args, Py_ssize_t given, Place *place)
{
    GroupWriter *writer = self->writer;
    if (writer->passed == NULL || writer->passed == Py_None)
        return 0;
    const int is_root = place->root < 0 || place->root == writer->slots[place->slot].rank;
    if (self->returned >= 0 && self->returned + 1 < given && (is_root || !self->returned_at_root)) {
        place->outputs = places_of(writer, args[self->returned + 1]);
        if (place->outputs == NULL && PyErr_Occurred())
            return -1;
    }
    if (self->given < 0 || self->given + 1 >= given || (!is_root && self->given_at_root))
        return 0;
    PyObject *tensors = args[self->given + 1];
    if (look_at(writer, tensors, &place->given) && look_late(writer, place, GOES_IN, tensors) < 0)
        return -1;
    return place->given.high == NOT_FINITE ? tell_passed(writer, place, 0, tensors) : 0;
}

int tell_before(GroupWriter *writer)
{
    if (writer->send_before == NULL || writer->send_before == Py_None)
        return 0;
    PyObject *done = PyObject_CallNoArgs(writer->send_before);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* As GroupTable's begin of the same call. `args` begins with the object. */
static int begin(GroupMethod *self, PyObject *const *args, Py_ssize_t given, Place *place)
{
    if (given < 1 || self->tensor + 1 >= given) /* called with keywords: only the group's own counter counts it */
        return 0;
    if (self->call == CALL_WAIT || self->call == CALL_BLOCK)
        return waits_for(self->writer, args[0], place);
    /* held: `args` holds the list, but a list may change while Python runs, and its item is gone then */
    PyObject *tensor = self->tensor >= 0 ? first_of(args[self->tensor + 1]) : NULL;
    Py_XINCREF(tensor);
    int noted;
    if (self->call == CALL_P2P) {
        const int64_t peer = integer_at(args, given, self->peer, -1), tag = integer_at(args, given, self->tag, 0);
        noted = begin_p2p(self->writer, args[0], self->operation, tensor, peer, tag, place);
    } else {
        const int64_t root = self->is_rooted && given > 1 ? root_of(args[given - 1]) : -1;
        noted = begin_collective(self->writer, args[0], self->operation, tensor, root, place);
    }
    Py_XDECREF(tensor);
    if (noted < 0 || (noted > 0 && look_at_inputs(self, args, given, place) < 0))
        return -1;
    return tell_before(self->writer) < 0 ? -1 : noted;
}

static int finish(GroupMethod *self, PyObject *object, PyObject *result, Place *place)
{
    GroupWriter *writer = self->writer;
    if ((self->call == CALL_P2P || self->call == CALL_BARRIER) && count_again(writer, place, object) < 0)
        return -1;
    if (self->call == CALL_BLOCK) /* its stream waits, and the host goes on */
        return ended(writer, place, 0) < 0 ? -1 : look_at_issued(writer, place);
    if (self->call == CALL_WAIT || self->call == CALL_BARRIER)
        return ended(writer, place, 1) < 0 ? -1 : look_at_outputs(writer, place);
    /* the script cannot wait for it alone: its backend has synchronised the stream, or it is one of a bundle of messages */
    const int has_no_work = result == Py_None || (self->call == CALL_P2P && place->message == NO_MESSAGE);
    if (has_no_work && look_at_issued(writer, place) < 0)
        return -1;
    return issued_work(writer, place, result);
}

static void note_failure(GroupMethod *self, PyObject *object, const Place *place)
{
    PyObject *type, *value, *trace;
    const int waits = self->call == CALL_WAIT || self->call == CALL_BLOCK;
    const int is_refused = self->call != CALL_BARRIER && is_own_error(); /* else a handler has raised in a group's own Python */
    PyErr_Fetch(&type, &value, &trace); /* the error of the call is raised; none may be set while the note is made */
    if (waits ? leave_phase(self->writer, place, GROUP_FAILED) < 0 : failed(self->writer, place, object, is_refused) < 0)
        drop_error();
    PyErr_Restore(type, value, trace);
}

/* What a signal's handler has raised before the operation is raised after it, as it is where the signal comes while C++
   runs. Else an operation would be counted that no other rank counts. */
static PyObject *method_call(GroupMethod *self, PyObject *const *args, Py_ssize_t given, PyObject *names)
{
    Place place = {.outputs = NULL, .given_late = NULL};
    /* A fault takes the method away from its class, while it runs: with that CPython gives up function and GroupMethod. */
    Py_INCREF(self);
    int noted = begin(self, args, given, &place), is_ours = noted < 0 && is_own_error();
    /* a handler has raised before the operation was counted */
    for (int again = 0; again < MOST_INTERRUPTED && noted < 0 && !is_ours && place.number == 0; again++) {
        drop_error();
        noted = begin(self, args, given, &place);
        is_ours = noted < 0 && is_own_error();
    }
    if (noted < 0) {
        tell_fault(self->writer);
        noted = is_ours || place.number == 0 ? noted : 1; /* it was counted: so its end is noted, too */
    }
    /* The script's call is made, whatever has become of the note: the other ranks make it, too, and wait for this one. */
    calls_inside += noted > 0;
    PyObject *result = PyObject_Vectorcall(self->before, args, (size_t)given, names);
    calls_inside -= noted > 0;
    if (noted > 0) {
        if (result == NULL)
            note_failure(self, args[0], &place);
        else if (finish(self, args[0], result, &place) < 0)
            tell_fault(self->writer);
    }
    clear_place(&place);
    Py_DECREF(self);
    return settled(result);
}

/* -- a method --------------------------------------------------------------------------------------------------- */

static int method_traverse(GroupMethod *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->writer);
    Py_VISIT(self->before);
    return 0;
}

static void method_dealloc(GroupMethod *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->writer);
    Py_CLEAR(self->before);
    Py_CLEAR(self->name);
    Py_CLEAR(self->doc);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Without tp_clear: a call needs what it holds. A cycle through it is broken in the GroupWriter. */
static PyType_Slot method_slots[] = {
    {Py_tp_doc, "What a replaced method of a process group calls and notes."},
    {Py_tp_dealloc, method_dealloc}, {Py_tp_traverse, method_traverse}, {0, NULL},
};
static PyType_Spec method_spec = {"gpuwatch.worker.native.core.GroupMethod", sizeof(GroupMethod), 0,
                                  TYPE_FLAGS | Py_TPFLAGS_DISALLOW_INSTANTIATION, method_slots};

static PyObject *writer_method(GroupWriter *self, PyObject *args)
{
    PyObject *name, *before;
    int call, is_rooted, given_at_root, returned_at_root;
    long long operation;
    Py_ssize_t tensor, peer, tag, given, returned;
    if (!PyArg_ParseTuple(args, "UOiLnnpnnnpp", &name, &before, &call, &operation, &tensor, &peer, &is_rooted, &tag, &given,
                          &returned, &given_at_root, &returned_at_root))
        return NULL;
    GroupMethod *method = (GroupMethod *)method_type->tp_alloc(method_type, 0);
    if (method == NULL)
        return NULL;
    method->writer = (GroupWriter *)Py_NewRef(self);
    method->before = Py_NewRef(function_of(before));
    method->name = Py_NewRef(name);
    method->doc = PyObject_GetAttrString(before, "__doc__");
    method->call = call;
    method->operation = operation;
    method->tensor = tensor;
    method->peer = peer;
    method->is_rooted = is_rooted;
    method->tag = tag;
    method->given = given;
    method->returned = returned;
    method->given_at_root = given_at_root;
    method->returned_at_root = returned_at_root;
    drop_error();
    method->definition = (PyMethodDef){PyUnicode_AsUTF8(name), METHOD(method_call), METH_FASTCALL | METH_KEYWORDS,
                                       method->doc != NULL && PyUnicode_Check(method->doc) ? PyUnicode_AsUTF8(method->doc)
                                                                                           : NULL};
    PyObject *function = method->definition.ml_name != NULL ? PyCFunction_New(&method->definition, (PyObject *)method) : NULL;
    PyObject *bound = function != NULL ? PyInstanceMethod_New(function) : NULL;
    Py_XDECREF(function);
    Py_DECREF(method);
    return bound;
}

/* -- the GroupWriter -------------------------------------------------------------------------------------------- */

static PyObject *writer_enter(GroupWriter *self, PyObject *args)
{
    Py_ssize_t number;
    PyObject *group;
    if (!PyArg_ParseTuple(args, "nO", &number, &group) || enter_group(self, number, group) < 0)
        return NULL;
    return settled(Py_NewRef(Py_None));
}

static PyObject *writer_remember(GroupWriter *self, PyObject *args)
{
    Py_ssize_t slot;
    PyObject *work;
    long long number, message;
    if (!PyArg_ParseTuple(args, "nOLL", &slot, &work, &number, &message))
        return NULL;
    if (slot < 0 || slot >= GROUPS)
        return wrong("no such slot");
    Place place = {(int)slot, self->slots[slot].holders, number, message, 0, -1, {NOT_LOOKED, 0}, NULL, NULL, 0, 0};
    if (issued_work(self, &place, work) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *writer_forget(GroupWriter *self, PyObject *ignored)
{
    (void)ignored;
    forget_groups(self);
    Py_RETURN_NONE;
}

static int writer_traverse(GroupWriter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
#define VISIT(NAME) Py_VISIT(self->NAME);
    EACH_GROUP_PART(VISIT)
    return 0;
}

static int writer_clear(GroupWriter *self)
{
    forget_groups(self);
#define CLEAR(NAME) Py_CLEAR(self->NAME);
    EACH_GROUP_PART(CLEAR)
    return 0;
}

static void writer_dealloc(GroupWriter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    writer_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int check_memory(GroupWriter *self)
{
    Py_buffer memory;
    if (PyObject_GetBuffer(self->memory, &memory, PyBUF_WRITABLE) < 0)
        return 0;
    const int fits = memory.len >= GROUPS_AT + GROUPS * GROUP_BYTES;
    PyBuffer_Release(&memory);
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "no room for the table of process groups");
    return fits;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
#define NAME_OF(NAME) #NAME,
#define FORMAT_OF(NAME) "O"
#define PLACE_OF(NAME) &self->NAME,
#define HOLD(NAME) Py_XINCREF(self->NAME);
    static char *names[] = {EACH_GROUP_PART(NAME_OF) "exchange", "is_host_late", NULL};
    PyObject *exchange;
    GroupWriter *self = (GroupWriter *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    const int parsed = PyArg_ParseTupleAndKeywords(args, kwargs, EACH_GROUP_PART(FORMAT_OF) "Op", names,
                                                   EACH_GROUP_PART(PLACE_OF) &exchange, &self->is_host_late);
    EACH_GROUP_PART(HOLD)
    if (parsed) {
        Py_SETREF(self->counter, Py_NewRef(function_of(self->counter)));
        if (check_memory(self) && (exchange == Py_None || (self->exchange = exchange_of(exchange)) != NULL))
            return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef writer_methods[] = {
    {"method", METHOD(writer_method), METH_VARARGS,
     "method(name, before, call, operation, tensor, peer, is_rooted, tag, given, returned, given_at_root, returned_at_root)"
     " -> method\n\nA method that notes and calls `before`. Positions of its arguments are -1 for none."},
    {"hook", METHOD(writer_hook), METH_VARARGS,
     "hook(group, operations) -> callable\n\nWhat torch calls before each collective of the group. operations: value of HookOpName -> code."},
    {"enter", METHOD(writer_enter), METH_VARARGS, "enter(number, group) -> None\n\nThe group holds that slot from now on."},
    {"remember", METHOD(writer_remember), METH_VARARGS,
     "remember(slot, work, number, message) -> None\n\nSomebody may wait for this work of the group in that slot."},
    {"forget", METHOD(writer_forget), METH_NOARGS, "forget() -> None\n\nForget all groups, and all works."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "Notes what this rank does in its process groups."},
    {Py_tp_new, writer_new}, {Py_tp_dealloc, writer_dealloc}, {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear}, {Py_tp_methods, writer_methods}, {0, NULL},
};
static PyType_Spec writer_spec = {"gpuwatch.worker.native.core.GroupWriter", sizeof(GroupWriter), 0, TYPE_FLAGS,
                                  writer_slots};

int add_group_methods(PyObject *module)
{
    method_type = (PyTypeObject *)PyType_FromSpec(&method_spec);
    PyTypeObject *type = method_type != NULL && add_group_hook() == 0 ? add_type(module, "GroupWriter", &writer_spec) : NULL;
    Py_XDECREF(type);
    return type == NULL ? -1 : 0;
}
