/* What the writer of process groups keeps of groups, operations and works. */

#ifndef GPUWATCH_GROUP_TYPES_H
#define GPUWATCH_GROUP_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "layout.h"
#include "tensor_view.h"

/* memory: the recorder's map. tensor, parameter, group: torch's classes. counter: the group's method that returns its own
   sequence number. describe(tensor) -> (code of the dtype, elements), of any tensor. find_slot(group): a group that is not
   known yet gets its slot there, with `enter`; or none. message_begun(slot, operation, peer, tag) -> message.
   message_received(slot, message). message_taken_back(slot, message). passed(slot, number, operation, root, message, came out?, high, dtype, tensors): some of
   the tensors are not finite; high and dtype describe the inputs. None: no tensor is read. late(slot, number, operation,
   root, message, when, given, tensors): reads tensors that cannot be read here, and returns the `given` of the call that
   reads the outputs: see worker/record/passed.py. send_before(): an operation begins; None: nobody is told.
   on_fault(exception). */
#define EACH_GROUP_PART(DO) \
    DO(memory) DO(tensor) DO(parameter) DO(group) DO(counter) DO(describe) DO(find_slot) \
    DO(message_begun) DO(message_received) DO(message_taken_back) DO(passed) DO(late) DO(send_before) DO(on_fault)

/* Who holds a slot of the table. `group` is only compared: `ref` tells whether it is still the same one. */
typedef struct {
    PyObject *group, *ref;
    int64_t holders; /* how many groups have held this slot */
    int64_t rank;    /* this rank's number in the group */
} GroupSlot;

enum { NO_MESSAGE = -1, NOT_LOOKED = -1, NOT_FINITE = -2 }; /* as in worker/record/group_messages.py and passed.py */

/* What some tensors hold: the bits of the largest number, or one of the above, and the code of its dtype. */
typedef struct {
    int64_t high, dtype;
} Look;

/* An operation in the table. */
typedef struct {
    int slot;
    int64_t holders, number;
    int64_t message; /* what message_begun has returned; NO_MESSAGE */
    int64_t operation, root;
    Look given;
    PyObject *outputs; /* places_of the tensors it writes into; NULL: they are not read. Owned */
    PyObject *given_late; /* what `late` returned for the inputs; NULL. Owned */
    int64_t what, elements; /* of a message: what its slot had of the one before it */
} Place;

/* How often a note is begun anew that a signal's handler has interrupted: without memory it would fail for ever. */
#define MOST_INTERRUPTED 16

/* A work that the script may wait for. `work` is only compared. */
typedef struct {
    PyObject *work, *ref;
    Place place;
} PendingWork;

enum { PENDING_WORKS = 1024, PROBES = 8 };

#define AS_GROUP_MEMBER(NAME) PyObject *NAME;
typedef struct {
    PyObject_HEAD
    EACH_GROUP_PART(AS_GROUP_MEMBER)
    const Exchange *exchange; /* NULL: every tensor is described by Python */
    int is_host_late;         /* for tests: tensors in host memory are those of a device */
    GroupSlot slots[GROUPS];
    PendingWork pending[PENDING_WORKS]; /* by a hash of the address; an entry that finds no room takes another's */
} GroupWriter;

#endif
