/* What a request meets at engines that let shorter prompts by: all of them in one call.
 *
 * passing.py has the law and does the same where this is not compiled, replica_queue.py what is before a place, in the
 * same order, so that both come to the same bits. Under load every replica has prompts that wait, and each decision asks
 * every one of them.
 *
 * Knows tokens, places and seconds; asks Python for a request's own, and for what it is promised.
 */
#include "reading.h"

#include <math.h>

enum { MOST_KINDS = 8 };
/* Where they are in a ReplicaState, a Price and a Sent. */
enum { REPLICA_ID, PRICE, NUM_REQUESTS = 5, QUEUED_TOKENS = 8, BUSY_UNTIL = 10, FIRST_AT, INFO = 15, STATE_FIELDS };
enum { STEP_TIME = 1, ROOM = 3, PASSED_S = 11, PRICE_FIELDS };
enum { HINTS = 6 };

/* Its own, on replicas that are alike. */
typedef struct {
    PyObject *step_time; /* borrowed */
    int64_t num_chunks, held;
    double own_s, place;
} Own;

typedef struct {
    PyObject *passable, *hints, *tenant, *own, *promised_place; /* borrowed */
    int64_t total, block_size;                                  /* tokens */
    double share, now;
    Own kinds[MOST_KINDS];
    int num_kinds; /* that were met; the latest of them are in `kinds` */
} Request;

typedef struct {
    double tokens, num_behind;
} Split;

static PyObject *MAX_RUNNING, *SENT, *SINCE, *LINES;                            /* names */
static PyObject *LAST, *PLACES, *SIZES, *TOLD, *TOLD_AT, *TOKENS, *SHARE, *HAD; /* of a line's */
static PyObject *NUM_MORE, *MORE_TOKENS;                                        /* of an account's */

/* --- one tenant's line: `Line.split` ------------------------------------------------------------------------------ */

static double item(PyObject *sequence, Py_ssize_t index) {
    PyObject *value = PySequence_GetItem(sequence, index);
    double found = number(value);
    Py_XDECREF(value);
    return found;
}

/* How many are before it, as `bisect_right` has it. -1: an exception is set. */
static Py_ssize_t num_up_to(PyObject *places, double place) {
    Py_ssize_t low = 0, high = PySequence_Size(places);
    while (low < high && !PyErr_Occurred()) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (place < item(places, middle)) high = middle;
        else low = middle + 1;
    }
    return PyErr_Occurred() ? -1 : high;
}

static double sum_of(PyObject *sizes, Py_ssize_t count) {
    double sum = 0.0;
    for (Py_ssize_t index = 0; index < count && !PyErr_Occurred(); index++) sum += item(sizes, index);
    return sum;
}

/* Adds those of places and sizes that are at `of` under these names. Whether all of them are before the place. */
static int split_columns(PyObject *of, PyObject *places_name, PyObject *sizes_name, double place, Split *into) {
    PyObject *places = PyObject_GetAttr(of, places_name), *sizes = PyObject_GetAttr(of, sizes_name);
    int is_all = 0;
    if (places != NULL && sizes != NULL) {
        Py_ssize_t count = num_up_to(places, place), size = PySequence_Size(places);
        if (count >= 0) {
            into->tokens += sum_of(sizes, count);
            into->num_behind += (double)(size - count);
            is_all = count == size;
        }
    }
    Py_XDECREF(places);
    Py_XDECREF(sizes);
    return is_all;
}

static int split(PyObject *line, double place, Split *into) {
    PyObject *told = PyObject_GetAttr(line, TOLD);
    into->tokens = into->num_behind = 0.0;
    if (told == NULL) return 0;
    split_columns(line, PLACES, SIZES, place, into);
    double told_at, num_more, more_tokens;
    if (!PyErr_Occurred() && told != Py_None && read_attribute(line, TOLD_AT, &told_at) &&
        read_attribute(told, NUM_MORE, &num_more) && read_attribute(told, MORE_TOKENS, &more_tokens)) {
        /* Whose places are not told may be before it, too. */
        if (split_columns(told, PLACES, TOKENS, place - told_at, into)) into->tokens += more_tokens;
        else into->num_behind += num_more;
    }
    Py_DECREF(told);
    return !PyErr_Occurred();
}

/* --- one replica's queue: `ReplicaQueue._part` -------------------------------------------------------------------- */

/* What it has had; 0, as a newcomer, where its engine has not told. */
static int read_had(PyObject *line, double *into) {
    PyObject *had = line != NULL ? PyObject_GetAttr(line, HAD) : NULL;
    *into = had == NULL || had == Py_None ? 0.0 : number(had);
    Py_XDECREF(had);
    return !PyErr_Occurred();
}

/* own: NULL where its tenant has none there. Of all that is queued, the part before so many tokens. */
static double part_before(PyObject *lines, PyObject *own, double before, int64_t uncached, double share) {
    double tokens, own_had;
    if (own != NULL && PyDict_Size(lines) == 1)
        return !read_attribute(own, TOKENS, &tokens) || tokens == 0.0 ? 1.0 : before / tokens;
    if (!read_had(own, &own_had)) return 1.0;
    double done_at = own_had + (before + (double)uncached) / share, total = 0.0, others = 0.0;
    PyObject *name, *line;
    Py_ssize_t position = 0;
    while (PyDict_Next(lines, &position, &name, &line)) {
        double begins_at, of_share;
        if (!read_attribute(line, TOKENS, &tokens)) return 1.0;
        total += tokens;
        if (line == own) continue;
        if (!read_had(line, &begins_at) || !read_attribute(line, SHARE, &of_share)) return 1.0;
        double turn = (done_at - begins_at) * of_share;
        if (!(turn > 0.0)) turn = 0.0;
        others += tokens < turn ? tokens : turn;
    }
    return total != 0.0 ? (before + others) / total : 1.0;
}

/* --- one replica: the body of `Passing.interpreted`'s loop -------------------------------------------------------- */

static const Own *own_of(Request *request, PyObject *queue, PyObject *price, int64_t held) {
    PyObject *step_time = PyTuple_GetItem(price, STEP_TIME);
    int64_t room = read_room(PyTuple_GetItem(price, ROOM));
    if (PyErr_Occurred()) return NULL;
    int64_t num_chunks = (request->total - held + room - 1) / room;
    for (int index = 0; index < request->num_kinds && index < MOST_KINDS; index++) {
        const Own *kind = &request->kinds[index];
        if (kind->step_time == step_time && kind->num_chunks == num_chunks && kind->held == held) return kind;
    }
    PyObject *tokens = PyLong_FromLongLong(held);
    PyObject *own = tokens ? PyObject_CallFunctionObjArgs(request->own, queue, price, tokens, NULL) : NULL;
    Own *kind = &request->kinds[request->num_kinds++ % MOST_KINDS];
    *kind = (Own){step_time, num_chunks, held, 0.0, 0.0};
    int is_read = own != NULL && PyArg_ParseTuple(own, "dd", &kind->own_s, &kind->place);
    Py_XDECREF(tokens);
    Py_XDECREF(own);
    return is_read ? kind : NULL;
}

/* Whether a prompt that was sent there and waits has that block. */
static int has_twin(PyObject *sent, PyObject *hints, Py_ssize_t last) {
    PyObject *name = PySequence_GetItem(hints, last), *request_id, *of;
    Py_ssize_t position = 0;
    int is_there = 0;
    while (!PyErr_Occurred() && !is_there && PyDict_Next(sent, &position, &request_id, &of)) {
        PyObject *others = PyTuple_GetItem(of, HINTS);
        if (others == NULL || PySequence_Size(others) <= last) continue;
        PyObject *other = PySequence_GetItem(others, last);
        is_there = other != NULL ? PyObject_RichCompareBool(other, name, Py_EQ) : -1;
        Py_XDECREF(other);
    }
    Py_XDECREF(name);
    return PyErr_Occurred() ? -1 : is_there;
}

/* Its place there, behind whoever is yet to compute what it is to find cached. */
static int read_place(const Request *request, PyObject *state, PyObject *queue, int64_t held, double *place) {
    Py_ssize_t last = (Py_ssize_t)(held / request->block_size) - 1;
    PyObject *sent = PyObject_GetAttr(queue, SENT);
    int is_promised = sent != NULL && last >= 0 && PyDict_Size(sent) > 0 ? has_twin(sent, request->hints, last) : 0;
    Py_XDECREF(sent);
    if (PyErr_Occurred()) return 0;
    if (!is_promised) return 1;
    PyObject *tokens = PyLong_FromLongLong(held);
    PyObject *promised = tokens ? PyObject_CallFunctionObjArgs(
                                      request->promised_place, PyTuple_GetItem(state, REPLICA_ID), tokens, NULL)
                                : NULL;
    double after = number(promised);
    if (after > *place) *place = after;
    Py_XDECREF(tokens);
    Py_XDECREF(promised);
    return !PyErr_Occurred();
}

/* A copy of a named tuple, with another value in one place: its reference becomes the copy's. */
static PyObject *copy_with(PyObject *of, Py_ssize_t size, Py_ssize_t place, PyObject *other) {
    PyObject *copy = other != NULL ? PyType_GenericAlloc(Py_TYPE(of), size) : NULL;
    if (copy == NULL) {
        Py_XDECREF(other);
        return NULL;
    }
    for (Py_ssize_t index = 0; index < size; index++) {
        PyObject *value = index == place ? other : PyTuple_GetItem(of, index);
        if (index != place) Py_XINCREF(value);
        PyTuple_SetItem(copy, index, value);
    }
    return copy;
}

/* `ReplicaState.letting_by`. */
static PyObject *letting_by(PyObject *state, PyObject *price, double before_s, double passed_s, double now) {
    PyObject *met = copy_with(price, PRICE_FIELDS, 0, PyFloat_FromDouble(now + before_s));
    PyObject *passed = met != NULL ? PyFloat_FromDouble(passed_s) : NULL;
    if (passed == NULL) {
        Py_XDECREF(met);
        return NULL;
    }
    PyTuple_SetItem(met, PASSED_S, passed);
    return copy_with(state, STATE_FIELDS, PRICE, met);
}

/* Its queue: NULL where nobody stands back for a newcomer, who without a place there would wait for one, which nobody
 * gives up. */
static PyObject *queue_at(const Request *request, PyObject *state, double *queue_s) {
    PyObject *queue = PyDict_GetItemWithError(request->passable, PyTuple_GetItem(state, REPLICA_ID)); /* borrowed */
    if (queue == NULL || PyTuple_GetItem(state, PRICE) == Py_None) return NULL;
    double max_running, num_requests = number(PyTuple_GetItem(state, NUM_REQUESTS));
    *queue_s = number(PyTuple_GetItem(state, BUSY_UNTIL)) - request->now;
    if (PyErr_Occurred() || !read_attribute(PyTuple_GetItem(state, INFO), MAX_RUNNING, &max_running)) return NULL;
    return *queue_s > 0.0 && num_requests < max_running ? queue : NULL;
}

/* Priced for who passes prompts of its own tenant; the state itself where its place is behind all of them. */
static PyObject *
passing(Request *request, PyObject *state, PyObject *price, PyObject *queue, int64_t held, double queue_s) {
    double since, last = INFINITY;
    PyObject *lines = PyObject_GetAttr(queue, LINES), *found = NULL;
    const Own *own = lines != NULL ? own_of(request, queue, price, held) : NULL;
    PyObject *line = own != NULL ? PyDict_GetItemWithError(lines, request->tenant) : NULL; /* borrowed */
    double place = own != NULL ? own->place : 0.0, own_s = own != NULL ? own->own_s : 0.0;
    if (own == NULL || PyErr_Occurred() || !read_place(request, state, queue, held, &place)) goto done;
    /* Of others' prompts places do not tell whose turn comes first. */
    if (line != NULL && PyDict_Size(lines) == 1 && !read_attribute(line, LAST, &last)) goto done;
    if (place >= last) {
        Py_INCREF(state);
        found = state;
        goto done;
    }
    Split of_line = {0.0, 0.0};
    if (line != NULL && !split(line, place, &of_line)) goto done;
    int64_t room = read_room(PyTuple_GetItem(price, ROOM));
    double part = part_before(lines, line, of_line.tokens, request->total - held, request->share);
    double queued_tokens = number(PyTuple_GetItem(state, QUEUED_TOKENS));
    double first_s = number(PyTuple_GetItem(state, FIRST_AT)) - request->now;
    double busy_until = number(PyTuple_GetItem(state, BUSY_UNTIL));
    if (PyErr_Occurred() || !read_attribute(queue, SINCE, &since)) goto done;
    double step_s = queue_s * (double)room / (queued_tokens > (double)room ? queued_tokens : (double)room);
    double before_s = part * (busy_until - since) - (request->now - since);
    if (step_s / 2.0 > before_s) before_s = step_s / 2.0;
    if (first_s > before_s) before_s = first_s;
    if (before_s > queue_s) before_s = queue_s;
    found = letting_by(state, price, before_s, of_line.num_behind * own_s, request->now);
done:
    Py_XDECREF(lines);
    return found;
}

static PyObject *met_at(Request *request, PyObject *state, int64_t held) {
    if (!PyTuple_Check(state) || PyTuple_Size(state) != STATE_FIELDS)
        return PyErr_Format(PyExc_TypeError, "a state is a tuple of %d", STATE_FIELDS);
    double queue_s;
    PyObject *queue = queue_at(request, state, &queue_s), *price = PyTuple_GetItem(state, PRICE);
    if (PyErr_Occurred()) return NULL;
    if (queue == NULL) {
        Py_INCREF(state);
        return state;
    }
    if (!PyTuple_Check(price) || PyTuple_Size(price) != PRICE_FIELDS)
        return PyErr_Format(PyExc_TypeError, "a price is a tuple of %d", PRICE_FIELDS);
    return passing(request, state, price, queue, held, queue_s);
}

/* --- the module --------------------------------------------------------------------------------------------------- */

/* states, cached: tuples. */
static PyObject *met_at_all(PyObject *states, PyObject *cached, Request *request) {
    Py_ssize_t num_replicas = PyTuple_Size(states);
    if (num_replicas != PyTuple_Size(cached))
        return PyErr_Format(PyExc_ValueError, "%zd states and %zd cached", num_replicas, PyTuple_Size(cached));
    PyObject *found = PyList_New(num_replicas);
    for (Py_ssize_t index = 0; found != NULL && index < num_replicas; index++) {
        int64_t held = num_tokens(PyTuple_GetItem(cached, index));
        PyObject *met = PyErr_Occurred() ? NULL : met_at(request, PyTuple_GetItem(states, index), held);
        if (met == NULL) Py_CLEAR(found);
        else PyList_SetItem(found, index, met);
    }
    return found;
}

static PyObject *met_by(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *state_sequence, *cached_sequence, *total, *block_size, *found = NULL;
    Request request = {0};
    if (!PyArg_ParseTuple(
            args, "OOO!OUdOOdOO", &state_sequence, &cached_sequence, &PyDict_Type, &request.passable, &request.hints,
            &request.tenant, &request.share, &total, &block_size, &request.now, &request.own, &request.promised_place
        ))
        return NULL;
    request.total = num_tokens(total);
    request.block_size = num_tokens(block_size);
    if (PyErr_Occurred()) return NULL;
    if (request.block_size == 0) return PyErr_Format(PyExc_ZeroDivisionError, "block_size = 0: needs 1 token");
    PyObject *states = PySequence_Tuple(state_sequence), *cached = PySequence_Tuple(cached_sequence);
    if (states != NULL && cached != NULL) found = met_at_all(states, cached, &request);
    Py_XDECREF(states);
    Py_XDECREF(cached);
    return found;
}

static PyMethodDef METHODS[] = {
    {"met_by", met_by, METH_VARARGS,
     "met_by(states, cached, passable, hints, tenant, share, total, block_size, now, own, promised_place): of each, the "
     "state as the request finds it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.native.passing", "What a request meets.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_passing(void) {
    struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&MAX_RUNNING, "max_running"}, {&SENT, "sent"},         {&SINCE, "since"}, {&LINES, "lines"},
        {&LAST, "last"},               {&PLACES, "places"},     {&SIZES, "sizes"}, {&TOLD, "told"},
        {&TOLD_AT, "told_at"},         {&TOKENS, "tokens"},     {&SHARE, "share"}, {&HAD, "had"},
        {&NUM_MORE, "num_more"},       {&MORE_TOKENS, "more_tokens"},
    };
    for (size_t index = 0; index < sizeof names / sizeof *names; index++)
        *names[index].name = PyUnicode_InternFromString(names[index].text);
    return PyErr_Occurred() ? NULL : PyModule_Create(&MODULE);
}
