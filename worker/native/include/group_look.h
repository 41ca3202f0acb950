/* Looks at the tensors that go into an operation of a process group, and come out of it. */

#ifndef GPUWATCH_GROUP_LOOK_H
#define GPUWATCH_GROUP_LOOK_H

#include "group_writer.h"

/* As PassedWhen in worker/record/passed.py. */
enum { GOES_IN = 0, CAME_OUT = 1, IS_ISSUED = 2 };

/* Add a tensor, or lists of tensors, to `look`: floats in one piece of host memory. 1 if there are tensors that `look_late`
   reads, else 0. */
int look_at(const GroupWriter *self, PyObject *tensors, Look *look);

/* Have `late` read the tensors that are not read here. -1 with an exception set. */
int look_late(GroupWriter *self, Place *place, int when, PyObject *tensors);

/* Likewise the tensors that an operation writes into, after its call: `late` knows when they are written. */
int look_at_issued(GroupWriter *self, Place *place);

/* A new list with a weak reference and the address of each tensor that these functions read, one after the other. NULL if
   there are none, or with an exception set. */
PyObject *places_of(const GroupWriter *self, PyObject *tensors);

/* Read the tensors that are alive, and call `passed` if one is not finite. -1 with an exception set. */
int look_at_outputs(GroupWriter *self, Place *place);

/* Call `passed` for the inputs or the outputs. -1 with an exception set. */
int tell_passed(GroupWriter *self, const Place *place, int came_out, PyObject *tensors);

#endif
