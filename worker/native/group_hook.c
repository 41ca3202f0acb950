/* What torch calls before each collective of a process group (ProcessGroup.register_pre_hook). It notes those that C++ issues
   by itself: DDP's reductions, functional collectives in compiled code. Python's own are noted by the replaced methods.

   It may come in a thread of autograd's, where DDP reduces a bucket in the backward: C++ takes the GIL for it. In such
   a thread no signal's handler runs (see errors.c). */

#include "group_methods.h"

#include "objects.h"
#include "types.h"

typedef struct {
    PyObject_HEAD
    GroupWriter *writer;
    PyObject *group;      /* a weak reference: the group holds the hook */
    PyObject *operations; /* value of torch's HookOpName -> code of the operation */
} GroupHook;

static PyTypeObject *hook_type;

/* The first of the tensors that go in, or else of those that come out; NULL if there are none, or with an exception set. */
static PyObject *tensor_of(PyObject *call)
{
    PyObject *names[] = {s_input_tensors, s_output_tensors}, *found = NULL;
    for (int i = 0; i < 2 && found == NULL; i++) {
        PyObject *tensors = PyObject_GetAttr(call, names[i]);
        if (tensors == NULL)
            return NULL;
        if (PyList_Check(tensors) && PyList_GET_SIZE(tensors) > 0)
            found = Py_NewRef(PyList_GET_ITEM(tensors, 0));
        Py_DECREF(tensors);
    }
    return found;
}

/* -1 with an exception set. */
static int note_call(GroupHook *self, PyObject *group, PyObject *call)
{
    Place place = {.outputs = NULL, .given_late = NULL};
    int64_t operation, root;
    PyObject *name = PyObject_GetAttr(call, s_name), *value = name != NULL ? PyObject_GetAttr(name, s_value) : NULL;
    PyObject *code = value != NULL ? PyDict_GetItemWithError(self->operations, value) : NULL; /* else it is no collective */
    const int known = code != NULL && integer_from(code, &operation);
    Py_XDECREF(name);
    Py_XDECREF(value);
    if (!known)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *tensor = tensor_of(call);
    int noted = PyErr_Occurred() ? -1 : 0;
    if (noted == 0)
        noted = begin_collective(self->writer, group, operation, tensor, integer_of(call, s_root, &root) ? root : -1, &place);
    Py_XDECREF(tensor);
    if (noted <= 0)
        return noted;
    noted = leave_phase(self->writer, &place, GROUP_ISSUED) < 0 ? -1 : tell_before(self->writer);
    if (noted < 0 && !is_own_error()) /* torch raises it from the collective, which then is not issued */
        take_back(self->writer, &place);
    return noted;
}

/* Raises what is not gpuwatch's own: torch raises it from the script's collective, which has not begun. */
static PyObject *hook_call(GroupHook *self, PyObject *args, PyObject *names)
{
    (void)names;
    /* a reference is taken: the script may drop the group while its hook runs */
    PyObject *group = calls_inside == 0 && PyTuple_GET_SIZE(args) == 1 ? object_of(self->group) : NULL;
    if (group != NULL && note_call(self, group, PyTuple_GET_ITEM(args, 0)) < 0)
        tell_fault(self->writer);
    Py_XDECREF(group);
    return settled(Py_NewRef(Py_None));
}

static int hook_traverse(GroupHook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->writer);
    Py_VISIT(self->operations);
    return 0;
}

static void hook_dealloc(GroupHook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->writer);
    Py_CLEAR(self->group);
    Py_CLEAR(self->operations);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot hook_slots[] = {
    {Py_tp_doc, "What torch calls before a collective of one group."},
    {Py_tp_call, hook_call}, {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse}, {0, NULL},
};
static PyType_Spec hook_spec = {"gpuwatch.worker.native.core.GroupHook", sizeof(GroupHook), 0,
                                TYPE_FLAGS | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};

PyObject *writer_hook(GroupWriter *self, PyObject *args)
{
    PyObject *group, *operations;
    if (!PyArg_ParseTuple(args, "OO!", &group, &PyDict_Type, &operations))
        return NULL;
    PyObject *ref = PyWeakref_NewRef(group, NULL);
    GroupHook *hook = ref != NULL ? (GroupHook *)hook_type->tp_alloc(hook_type, 0) : NULL;
    if (hook == NULL) {
        Py_XDECREF(ref);
        return NULL;
    }
    hook->writer = (GroupWriter *)Py_NewRef(self);
    hook->group = ref;
    hook->operations = Py_NewRef(operations);
    return (PyObject *)hook;
}

int add_group_hook(void)
{
    hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    return hook_type == NULL ? -1 : 0;
}
