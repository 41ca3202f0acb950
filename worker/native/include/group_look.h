/* Looks at the tensors that go into an operation of a process group, and come out of it. */

#ifndef GPUWATCH_GROUP_LOOK_H
#define GPUWATCH_GROUP_LOOK_H

#include "group_writer.h"

/* Add what is in a tensor, or in lists of tensors, to `look`. Only floats in one piece of host memory are looked at. */
void look_at(const GroupWriter *self, PyObject *tensors, Look *look);

/* Of the tensors that `look_at` would look at, a weak reference and the address, one after the other in a new list. NULL if
   there are none, or with an exception set. */
PyObject *places_of(const GroupWriter *self, PyObject *tensors);

/* Look at those that are alive, and tell `passed` of them if one is not finite. -1 with an exception set. */
int look_at_outputs(GroupWriter *self, const Place *place);

/* Call `passed` for what goes in, or what came out. -1 with an exception set. */
int tell_passed(GroupWriter *self, const Place *place, int came_out, PyObject *tensors);

#endif
