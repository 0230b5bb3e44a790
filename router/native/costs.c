/* What a request would cost on each replica, all of them in one call.
 *
 * The sum is cost.py's, which has its reasons and makes the same where this is not compiled: in the same order, so that
 * both come to the same bits. Every decision asks every replica, and in Python most of its time is the interpreter's.
 *
 * Knows tokens and seconds; knows neither replicas nor hashes.
 */
#include "reading.h"

#include <math.h>

typedef struct {
    PyObject *of; /* whose fields these are; borrowed, NULL before the first */
    double base_s, per_token_s, per_attention_s, per_sequence_s;
} StepTime;

typedef struct {
    double busy_until, decode_s, step_s, boundary_at, memory_pressure, regret, alone_s, uses_lost, passed_s;
    int64_t room;
    PyObject *step_time, *fleet_time; /* borrowed */
} Price;

typedef struct {
    int64_t total, hot, most_cached; /* tokens */
    double recompute_weight, hot_share;
} Shape;

/* --- what Python hands over: where it is something else an exception is set ------------------------------------- */

static PyObject *BASE_S, *PER_TOKEN_S, *PER_ATTENTION_S, *PER_SEQUENCE_S; /* names */

static int read_shape(PyObject *shape, Shape *into) {
    into->total = num_tokens(PyTuple_GetItem(shape, 0));
    into->hot = num_tokens(PyTuple_GetItem(shape, 1));
    into->recompute_weight = number(PyTuple_GetItem(shape, 2));
    into->hot_share = number(PyTuple_GetItem(shape, 3));
    into->most_cached = num_tokens(PyTuple_GetItem(shape, 4));
    return !PyErr_Occurred();
}

static int read_price(PyObject *price, Price *into) {
    if (!PyTuple_Check(price)) {
        PyErr_SetString(PyExc_TypeError, "a price is a tuple");
        return 0;
    }
    into->busy_until = number(PyTuple_GetItem(price, 0));
    into->step_time = PyTuple_GetItem(price, 1);
    into->decode_s = number(PyTuple_GetItem(price, 2));
    into->room = read_room(PyTuple_GetItem(price, 3));
    into->step_s = number(PyTuple_GetItem(price, 4));
    into->boundary_at = number(PyTuple_GetItem(price, 5));
    into->memory_pressure = number(PyTuple_GetItem(price, 6));
    into->fleet_time = PyTuple_GetItem(price, 7);
    into->regret = number(PyTuple_GetItem(price, 8));
    into->alone_s = number(PyTuple_GetItem(price, 9));
    into->uses_lost = number(PyTuple_GetItem(price, 10));
    into->passed_s = number(PyTuple_GetItem(price, 11));
    return !PyErr_Occurred();
}

/* Mostly all are machines of one kind: then they are read once. */
static int read_step_time(PyObject *model, StepTime *into) {
    if (into->of == model) return 1;
    into->of = model;
    return read_attribute(model, BASE_S, &into->base_s) && read_attribute(model, PER_TOKEN_S, &into->per_token_s) &&
           read_attribute(model, PER_ATTENTION_S, &into->per_attention_s) &&
           read_attribute(model, PER_SEQUENCE_S, &into->per_sequence_s);
}

/* --- the sum ---------------------------------------------------------------------------------------------------- */

static double chunks_of(int64_t uncached, int64_t room) {
    return uncached <= room ? 1.0 : (double)((uncached + room - 1) / room);
}

/* (query, key), of a prompt behind so much of it. */
static double pairs_behind(int64_t cached, int64_t total) {
    return (double)(total * total - cached * cached) / 2.0;
}

static double steps_s(const StepTime *model, double chunks, int64_t uncached, double pairs) {
    return chunks * (model->base_s + model->per_sequence_s) + (double)uncached * model->per_token_s +
           pairs * model->per_attention_s;
}

/* Of the step that is in progress: `step_left_s` of cost.py. */
static double left_of_step_s(const Price *price, double now) {
    double left_s = price->boundary_at - now;
    if (left_s >= 0.0) return left_s;
    if (price->step_s == 0.0) return 0.0;
    if (isinf(left_s)) return price->step_s / 2.0;
    double rest_s = fmod(left_s, price->step_s); /* not above 0, and Python's `%` is not below it */
    return rest_s == 0.0 ? 0.0 : rest_s + price->step_s;
}

static double wait_s(const Price *price, int64_t held, const Shape *shape, double now) {
    double queued_s = price->busy_until - now, left_s = left_of_step_s(price, now);
    if (held < shape->most_cached && left_s < price->step_s / 2.0) left_s = price->step_s / 2.0;
    return queued_s < left_s ? left_s : queued_s;
}

static double expected_time_s(
    const Price *price, const StepTime *own, const StepTime *fleet, int64_t held, const Shape *shape, double now,
    double memory_pressure_s
) {
    double surcharge = shape->recompute_weight - 1.0, invested = 1.0 - shape->hot_share;
    int64_t uncached = shape->total - held, cold = shape->total - shape->hot;
    double chunks = chunks_of(uncached, price->room), pairs = pairs_behind(held, shape->total);
    double own_s = steps_s(own, chunks, uncached, pairs), charged_s = shape->recompute_weight * own_s;
    if (fleet != own) charged_s = own_s + surcharge * steps_s(fleet, chunks, uncached, pairs);
    double other_s = wait_s(price, held, shape, now) + price->passed_s + chunks * price->decode_s + price->alone_s +
                     memory_pressure_s * price->memory_pressure;
    if (shape->hot <= held) return other_s + charged_s + price->regret * own_s;
    chunks = cold ? chunks_of(cold, price->room) : 0.0;
    pairs = pairs_behind(shape->hot, shape->total);
    double cold_s = steps_s(own, chunks, cold, pairs);
    double again_s = fleet != own ? steps_s(fleet, chunks, cold, pairs) : cold_s;
    double charge_s = surcharge * again_s + price->regret * cold_s;
    double invested_s = own_s + charge_s - invested * (own_s - cold_s);
    if (price->uses_lost != 0.0) {
        double swapped = price->uses_lost * shape->hot_share;
        if (swapped > 1.0) swapped = 1.0;
        invested_s += swapped * (charged_s + price->regret * own_s - invested_s);
    }
    return other_s + invested_s;
}

/* --- the module -------------------------------------------------------------------------------------------------- */

/* prices, cached: tuples. */
static PyObject *costs_of(PyObject *prices, PyObject *cached, const Shape *shape, double now, double memory_pressure_s) {
    StepTime own = {0}, typical = {0};
    Py_ssize_t num_replicas = PyTuple_Size(prices);
    if (num_replicas != PyTuple_Size(cached))
        return PyErr_Format(PyExc_ValueError, "%zd prices and %zd cached", num_replicas, PyTuple_Size(cached));
    PyObject *found = PyList_New(num_replicas);
    for (Py_ssize_t index = 0; found != NULL && index < num_replicas; index++) {
        Price price;
        int64_t held = num_tokens(PyTuple_GetItem(cached, index));
        int is_read = !PyErr_Occurred() && read_price(PyTuple_GetItem(prices, index), &price) &&
                      read_step_time(price.step_time, &own) &&
                      (price.fleet_time == price.step_time || read_step_time(price.fleet_time, &typical));
        if (is_read) {
            const StepTime *fleet = price.fleet_time == price.step_time ? &own : &typical;
            double cost_s = expected_time_s(&price, &own, fleet, held, shape, now, memory_pressure_s);
            PyList_SetItem(found, index, PyFloat_FromDouble(cost_s));
        }
        if (PyErr_Occurred()) Py_CLEAR(found);
    }
    return found;
}

static PyObject *expected_times(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *price_sequence, *cached_sequence, *shape_tuple, *found = NULL;
    double now, memory_pressure_s;
    Shape shape;
    if (!PyArg_ParseTuple(
            args, "OOO!dd", &price_sequence, &cached_sequence, &PyTuple_Type, &shape_tuple, &now, &memory_pressure_s
        ) ||
        !read_shape(shape_tuple, &shape))
        return NULL;
    PyObject *prices = PySequence_Tuple(price_sequence), *cached = PySequence_Tuple(cached_sequence);
    if (prices != NULL && cached != NULL) found = costs_of(prices, cached, &shape, now, memory_pressure_s);
    Py_XDECREF(prices);
    Py_XDECREF(cached);
    return found;
}

static PyMethodDef METHODS[] = {
    {"expected_times", expected_times, METH_VARARGS,
     "expected_times(prices, cached, shape, now, memory_pressure_s): seconds, of each."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.native.costs", "Costs of a request.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_costs(void) {
    BASE_S = PyUnicode_InternFromString("base_s");
    PER_TOKEN_S = PyUnicode_InternFromString("per_token_s");
    PER_ATTENTION_S = PyUnicode_InternFromString("per_attention_s");
    PER_SEQUENCE_S = PyUnicode_InternFromString("per_sequence_s");
    return PyErr_Occurred() ? NULL : PyModule_Create(&MODULE);
}
