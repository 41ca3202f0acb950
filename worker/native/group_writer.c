/* Writes the table of process groups while another process reads it. The caller keeps the GIL.

   Each function first asks Python and torch, then borrows the map, writes, and gives it back: in between nothing is called, so no
   other thread writes, and the file cannot be closed. The phase of a slot, G_STATE, is published last (see `publish`): a
   reader that sees it sees the operation that it is about.

   Groups and works are objects of pybind11. Python's object may go while the one in C++ stays, and a new object of Python, for the
   same one or another, may get its address. So a weak reference stands beside each address, and nothing here keeps a
   work alive: it may own tensors of the script. */

#include "group_writer.h"

#include <time.h>

#include "objects.h"
#include "pending_works.h"

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* Python's time.monotonic_ns() */
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

PyObject *function_of(PyObject *method)
{
    return PyInstanceMethod_Check(method) ? PyInstanceMethod_GET_FUNCTION(method) : method;
}

/* -- slots ------------------------------------------------------------------------------------------------------ */

static int slot_of(const GroupWriter *self, PyObject *group)
{
    for (int slot = 0; slot < GROUPS; slot++)
        if (self->slots[slot].group == group && is_ref_to(self->slots[slot].ref, group))
            return slot;
    return -1;
}

int enter_group(GroupWriter *self, Py_ssize_t number, PyObject *group)
{
    if (number < 0 || number >= GROUPS) {
        PyErr_SetString(PyExc_ValueError, "no such slot");
        return -1;
    }
    PyObject *ref = PyWeakref_NewRef(group, NULL); /* without a callback it is one object, which all share that ask for it */
    if (ref == NULL)
        return -1;
    GroupSlot *slot = &self->slots[number];
    PyObject *rank = PyObject_CallMethodNoArgs(group, s_rank);
    if (rank == NULL || !integer_from(rank, &slot->rank))
        slot->rank = -1;
    Py_XDECREF(rank);
    drop_error();
    Py_XSETREF(slot->ref, ref);
    slot->group = group;
    slot->holders++; /* a Place of the group before is void now: `borrow_place` compares */
    return 0;
}

void forget_groups(GroupWriter *self)
{
    for (int slot = 0; slot < GROUPS; slot++) {
        self->slots[slot].group = NULL;
        self->slots[slot].holders++;
        Py_CLEAR(self->slots[slot].ref);
    }
    forget_works(self);
}

/* The slot of a group. -1 if it has none; -2 with an exception set. */
static int find_slot(GroupWriter *self, PyObject *group)
{
    const int slot = slot_of(self, group);
    if (slot >= 0)
        return slot;
    if (self->find_slot == NULL) /* the interpreter ends, and has cleared this object */
        return -1;
    PyObject *found = PyObject_CallOneArg(self->find_slot, group);
    if (found == NULL)
        return -2;
    Py_DECREF(found);
    return slot_of(self, group);
}

/* The integers of a slot, until PyBuffer_Release; NULL with an exception set. The map is borrowed anew each time: a map
   whose memory is lent could not be closed. */
static int64_t *borrow_slot(GroupWriter *self, int slot, Py_buffer *memory)
{
    if (PyObject_GetBuffer(self->memory, memory, PyBUF_WRITABLE) < 0)
        return NULL;
    return (int64_t *)((char *)memory->buf + GROUPS_AT + slot * GROUP_BYTES);
}

/* Likewise of an operation that was begun earlier. NULL with no exception set if another group holds its slot by now. */
static int64_t *borrow_place(GroupWriter *self, const Place *place, Py_buffer *memory)
{
    return self->slots[place->slot].holders == place->holders ? borrow_slot(self, place->slot, memory) : NULL;
}

/* -- begin ------------------------------------------------------------------------------------------------------ */

static int counted_by(GroupWriter *self, PyObject *group, int64_t *counted)
{
    /* torch's own class: its function is called without a lookup. A subclass may have a counter of its own, in Python. */
    PyObject *found = (PyObject *)Py_TYPE(group) == self->group
                          ? PyObject_CallOneArg(self->counter, group)
                          : PyObject_CallMethodNoArgs(group, s__get_sequence_number_for_group);
    if (found == NULL)
        return -1;
    *counted = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

static int describe(GroupWriter *self, PyObject *tensor, int64_t *dtype, int64_t *elements)
{
    *dtype = *elements = 0;
    if (tensor == NULL || tensor == Py_None)
        return 0;
    TensorView view;
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (self->exchange != NULL && (type == self->tensor || type == self->parameter) &&
        view_of(self->exchange, tensor, &view)) {
        *dtype = view.dtype;
        *elements = 1;
        for (int i = 0; i < view.dl.ndim; i++)
            *elements *= view.dl.shape[i];
        return 0;
    }
    long long code, count;
    PyObject *pair = PyObject_CallOneArg(self->describe, tensor);
    const int good = pair != NULL && PyArg_ParseTuple(pair, "LL", &code, &count);
    Py_XDECREF(pair);
    if (!good)
        return -1;
    *dtype = code;
    *elements = count;
    return 0;
}

static void move(int64_t *fields, int64_t begun, int64_t state, int64_t at, int64_t now)
{
    fields[G_BEGUN] = begun;
    fields[G_AT] = at;
    fields[G_SINCE_NS] = now;
    publish(&fields[G_STATE], state);
}

static int64_t what_of(int64_t operation, int64_t dtype, int64_t peer)
{
    return operation | dtype << 8 | (peer + 1) << 16;
}

static int64_t *operation_of(int64_t *fields, int64_t number)
{
    return fields + (RECENT_AT + OPERATION_BYTES * (number % RECENT)) / 8;
}

/* What an operation that begins is about. */
typedef struct {
    int slot;
    int64_t counted, dtype, elements;
    int64_t *fields; /* the slot's integers, until PyBuffer_Release of `memory` */
    Py_buffer memory;
} Begun;

/* 0 if its group is not shown; -1 with an exception set. Nothing is borrowed then. */
static int look(GroupWriter *self, PyObject *group, PyObject *tensor, Begun *new)
{
    new->slot = find_slot(self, group);
    if (new->slot < 0)
        return new->slot + 1;
    /* the counter comes last: a signal's handler may communicate where Python runs */
    if (describe(self, tensor, &new->dtype, &new->elements) < 0 || counted_by(self, group, &new->counted) < 0)
        return -1;
    new->fields = borrow_slot(self, new->slot, &new->memory);
    return new->fields == NULL ? -1 : 1;
}

int begin_collective(GroupWriter *self, PyObject *group, int64_t operation, PyObject *tensor, int64_t root, Place *place)
{
    Begun new;
    const int found = look(self, group, tensor, &new);
    if (found <= 0)
        return found;
    int64_t *fields = new.fields;
    /* torch has counted more than was noted: C++ has issued collectives by itself (DDP), which ranks must count alike */
    const int64_t unseen = new.counted - fields[G_COUNTED];
    const int64_t number = fields[G_BEGUN] + 1 + (unseen > 0 ? unseen : 0);
    int64_t *recent = operation_of(fields, number);
    /* The call that follows raises torch's own counter by one. That one is added here in advance, so that it is not taken for
       an operation of C++'s: in another thread, or in a signal's handler, before the call is made. */
    fields[G_COUNTED] = (unseen > 0 ? new.counted : fields[G_COUNTED]) + 1;
    recent[0] = number;
    recent[1] = what_of(operation, new.dtype, root);
    recent[2] = new.elements;
    recent[3] = now_ns();
    recent[4] = 0;
    move(fields, number, GROUP_ISSUING, number, recent[3]);
    PyBuffer_Release(&new.memory);
    *place = (Place){new.slot, self->slots[new.slot].holders, number, NO_MESSAGE, operation, root, {NOT_LOOKED, 0}, NULL, NULL, 0, 0};
    return 1;
}

int begin_p2p(GroupWriter *self, PyObject *group, int64_t operation, PyObject *tensor, int64_t peer, int64_t tag, Place *place)
{
    Begun new;
    const int found = look(self, group, tensor, &new);
    if (found <= 0)
        return found;
    int64_t *fields = new.fields;
    const int64_t unseen = new.counted - fields[G_COUNTED], number = -(fields[G_P2P] + 1);
    const int64_t what = fields[G_P2P_WHAT], elements = fields[G_P2P_ELEMENTS];
    if (unseen > 0)
        fields[G_COUNTED] = new.counted;
    fields[G_P2P] = -number;
    fields[G_P2P_WHAT] = what_of(operation, new.dtype, peer);
    fields[G_P2P_ELEMENTS] = new.elements;
    move(fields, fields[G_BEGUN] + (unseen > 0 ? unseen : 0), GROUP_ISSUING, number, now_ns());
    PyBuffer_Release(&new.memory);
    *place = (Place){new.slot, self->slots[new.slot].holders, number, NO_MESSAGE, operation, -1, {NOT_LOOKED, 0}, NULL, NULL,
                     what, elements};
    if (self->message_begun == NULL) /* the interpreter ends, and has cleared this object */
        return 1;
    PyObject *message = NULL;
    /* if a signal's handler has raised in there, nothing was counted: and the call is made (see method_call) */
    for (int again = 0; again <= MOST_INTERRUPTED && message == NULL; again++) {
        if (again && is_own_error())
            break;
        drop_error();
        message = PyObject_CallFunction(self->message_begun, "iLLL", new.slot, (long long)operation, (long long)peer,
                                        (long long)tag);
    }
    const int good = message != NULL && integer_from(message, &place->message);
    Py_XDECREF(message);
    return good ? 1 : -1;
}

/* -- works ------------------------------------------------------------------------------------------------------ */

int waits_for(GroupWriter *self, PyObject *work, Place *place)
{
    Py_buffer memory;
    PendingWork *entry = entry_of(self, work);
    if (entry == NULL)
        return 0;
    const int is_same = is_ref_to(entry->ref, work); /* else another work had this address before */
    *place = entry->place;
    entry->place.outputs = entry->place.given_late = NULL;
    entry->work = NULL;
    Py_CLEAR(entry->ref);
    int64_t *fields = is_same ? borrow_place(self, place, &memory) : NULL;
    if (fields == NULL)
        return PyErr_Occurred() ? -1 : 0;
    move(fields, fields[G_BEGUN], GROUP_WAITING, place->number, now_ns());
    PyBuffer_Release(&memory);
    return 1;
}

int issued_work(GroupWriter *self, Place *place, PyObject *work)
{
    Py_buffer memory;
    int64_t *fields = borrow_place(self, place, &memory);
    if (fields == NULL)
        return PyErr_Occurred() ? -1 : 0;
    publish(&fields[G_STATE], fields[G_AFTER]);
    PyBuffer_Release(&memory);
    if (work == Py_None)
        return 1;
    PyObject *ref = PyWeakref_NewRef(work, NULL);
    if (ref == NULL)
        return -1;
    PendingWork *entry = room_for(self, work);
    entry->work = work;
    /* The entry is whole before a reference is given up: that may run a destructor, and so Python, which may come here again. */
    Place before = entry->place;
    entry->place = *place;
    place->outputs = place->given_late = NULL; /* the entry owns them now */
    clear_place(&before);
    Py_XSETREF(entry->ref, ref);
    return 1;
}

int ended(GroupWriter *self, const Place *place, int on_host)
{
    Py_buffer memory;
    int64_t *fields = borrow_place(self, place, &memory);
    if (fields == NULL)
        return PyErr_Occurred() ? -1 : 0;
    const int64_t now = now_ns();
    ((int64_t *)memory.buf)[F_WAITED_NS] += now - fields[G_SINCE_NS];
    if (on_host && fields[G_ENDED] >= 0 && place->number > 0) { /* below 0: the device ends them */
        int64_t *recent = operation_of(fields, place->number);
        if (recent[0] == place->number)
            recent[4] = now - recent[3];
        if (place->number > fields[G_ENDED])
            fields[G_ENDED] = place->number;
    }
    publish(&fields[G_STATE], fields[G_AFTER]);
    PyBuffer_Release(&memory);
    if (place->message == NO_MESSAGE || self->message_received == NULL)
        return 1;
    PyObject *done = PyObject_CallFunction(self->message_received, "iL", place->slot, (long long)place->message);
    Py_XDECREF(done);
    return done != NULL ? 1 : -1;
}

int leave_phase(GroupWriter *self, const Place *place, int64_t phase)
{
    Py_buffer memory;
    int64_t *fields = borrow_place(self, place, &memory);
    if (fields == NULL)
        return PyErr_Occurred() ? -1 : 0;
    publish(&fields[G_STATE], phase == GROUP_ISSUED && fields[G_AFTER] != 0 ? fields[G_AFTER] : phase);
    PyBuffer_Release(&memory);
    return 1;
}

int failed(GroupWriter *self, const Place *place, PyObject *group, int is_refused)
{
    Py_buffer memory;
    int64_t counted;
    const int known = counted_by(self, group, &counted) == 0;
    int64_t *fields = known ? borrow_place(self, place, &memory) : NULL;
    if (fields == NULL)
        return PyErr_Occurred() ? -1 : 0;
    const int is_message = is_refused && place->number < 0;
    if (is_message) {
        if (fields[G_P2P] == -place->number) {
            fields[G_P2P_WHAT] = place->what;
            fields[G_P2P_ELEMENTS] = place->elements;
        }
        fields[G_P2P]--;
    } else if (is_refused && counted < fields[G_COUNTED])
        fields[G_BEGUN]--;
    fields[G_COUNTED] = counted;
    publish(&fields[G_STATE], GROUP_FAILED);
    PyBuffer_Release(&memory);
    if (!is_message || self->message_taken_back == NULL)
        return 1;
    PyObject *done = PyObject_CallFunction(self->message_taken_back, "iL", place->slot, (long long)place->message);
    Py_XDECREF(done);
    return done != NULL ? 1 : -1;
}

void take_back(GroupWriter *self, const Place *place)
{
    Py_buffer memory;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace); /* no function of CPython may be called while an exception is set */
    int64_t *fields = borrow_place(self, place, &memory);
    if (fields != NULL) {
        fields[G_BEGUN]--;
        fields[G_COUNTED]--;
        publish(&fields[G_STATE], fields[G_AFTER]);
        PyBuffer_Release(&memory);
    }
    drop_error();
    PyErr_Restore(type, error, trace);
}

int count_again(GroupWriter *self, const Place *place, PyObject *group)
{
    Py_buffer memory;
    int64_t counted;
    if (counted_by(self, group, &counted) < 0)
        return -1;
    int64_t *fields = borrow_place(self, place, &memory);
    if (fields == NULL)
        return PyErr_Occurred() ? -1 : 0;
    fields[G_COUNTED] = counted;
    PyBuffer_Release(&memory);
    return 1;
}
