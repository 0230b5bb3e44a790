/* How deep each replica holds a chain: `PackedTable.depths`, up to 1,024 members.
 *
 * packed_table.py has the law and does the same where this is not compiled, linear_hashing.py where a hint belongs.
 *
 * Knows 64-bit hints and member numbers; knows neither replicas nor prefixes.
 */
#include "table.h"

enum {
    MOST_GUESSES = 7,
    MOST_TRIED = MOST_GUESSES + 1, /* with the chain's end */
    MOST_STRETCHES = MOST_TRIED + 8 * sizeof(Py_ssize_t),
};

typedef struct {
    uint64_t words[MOST_WORDS]; /* as many of them as the table has */
} Set;

typedef struct {
    Py_ssize_t left, right; /* all hold what is before the first hint, nobody what is after the last */
    Set at_left, at_right;
} Stretch;

static int is_same(const Set *one, const Set *other, int num_words) {
    for (int word = 0; word < num_words; word++)
        if (one->words[word] != other->words[word]) return 0;
    return 1;
}

/* Into `held`: of `among` who is in the hint's set, and all of `besides`. */
static void look_up(const Table *table, uint64_t hint, const Set *among, const Set *besides, Set *held) {
    uint64_t slot = slot_of(table, hint);
    if (item(&table->keys, slot) != hint) {
        *held = *besides;
        return;
    }
    for (int word = 0; word < table->num_words; word++)
        held->words[word] = (item(&table->words[word], slot) & among->words[word]) | besides->words[word];
}

/* The first guess that lies within and was not tried, else the middle. */
static Py_ssize_t next_place(const Stretch *at, const Py_ssize_t *guesses, int num_guesses, int *num_tried) {
    while (*num_tried < num_guesses) {
        Py_ssize_t guess = guesses[(*num_tried)++];
        if (at->left < guess && guess < at->right) return guess;
    }
    return (at->left + at->right) >> 1;
}

/* Bits of 64 more numbers, below those there are. Takes `above` for its own, NULL too; NULL: an exception is set. */
static PyObject *with_word(PyObject *above, uint64_t word) {
    PyObject *bits = PyLong_FromLong(64), *below = PyLong_FromUnsignedLongLong(word), *shifted = NULL, *both = NULL;
    if (above != NULL && bits != NULL && below != NULL) shifted = PyNumber_Lshift(above, bits);
    if (shifted != NULL) both = PyNumber_Or(shifted, below);
    Py_XDECREF(above), Py_XDECREF(bits), Py_XDECREF(below), Py_XDECREF(shifted);
    return both;
}

/* As a Python integer. */
static PyObject *as_number(const uint64_t *words, int num_words) {
    PyObject *number = PyLong_FromUnsignedLongLong(words[num_words - 1]);
    for (int word = num_words - 2; word >= 0; word--) number = with_word(number, words[word]);
    return number;
}

/* Who holds what is before the stretch's last hint, and not that. */
static int note(PyObject *found, const Stretch *at, int num_words) {
    uint64_t parting[MOST_WORDS];
    for (int word = 0; word < num_words; word++) parting[word] = at->at_left.words[word] ^ at->at_right.words[word];
    PyObject *members = as_number(parting, num_words);
    PyObject *group = members == NULL ? NULL : Py_BuildValue("nN", at->right, members);
    int is_noted = group != NULL && PyList_Append(found, group) == 0;
    Py_XDECREF(group);
    return is_noted;
}

static int find_depths(
    PyObject *found, const Table *table, const Py_buffer *chain, const Set *members, const Py_ssize_t *guesses,
    int num_guesses
) {
    Stretch deeper[MOST_STRETCHES], at = {-1, chain->shape[0], *members, {{0}}};
    int num_deeper = 0, num_tried = 0, num_words = table->num_words;
    const Set nobody = {{0}};
    Set held = nobody;
    for (Py_ssize_t place = 0;; place = next_place(&at, guesses, num_guesses, &num_tried)) {
        look_up(table, item(chain, place), &at.at_left, &at.at_right, &held);
        if (place == 0) {
            at.left = 0, at.at_left = held;
            if (is_same(&held, &nobody, num_words)) return 1;
        } else if (is_same(&held, &at.at_left, num_words)) {
            at.left = place;
        } else {
            if (!is_same(&held, &at.at_right, num_words))
                deeper[num_deeper++] = (Stretch){place, at.right, held, at.at_right};
            at.right = place, at.at_right = held;
        }
        while (at.right - at.left == 1) {
            if (!is_same(&at.at_left, &at.at_right, num_words) && !note(found, &at, num_words)) return 0;
            if (num_deeper == 0) return 1;
            at = deeper[--num_deeper];
        }
    }
}

/* --- the module -------------------------------------------------------------------------------------------------- */

/* As many words of a Python integer as the table has. 0: an exception is set. */
static int read_members(PyObject *from, int num_words, Set *into) {
    into->words[0] = PyLong_AsUnsignedLongLongMask(from);
    for (int word = 1; word < num_words && !PyErr_Occurred(); word++) {
        PyObject *bits = PyLong_FromLong(64L * word), *above = bits == NULL ? NULL : PyNumber_Rshift(from, bits);
        if (above != NULL) into->words[word] = PyLong_AsUnsignedLongLongMask(above);
        Py_XDECREF(bits), Py_XDECREF(above);
    }
    return !PyErr_Occurred();
}

/* The chain's end is the first of them. -1: an exception is set. */
static int read_guesses(PyObject *from, Py_ssize_t num_hints, Py_ssize_t *into) {
    Py_ssize_t num_given = PyTuple_Size(from);
    if (num_given > MOST_GUESSES) {
        PyErr_Format(PyExc_ValueError, "%zd guesses: takes up to %d", num_given, MOST_GUESSES);
        return -1;
    }
    into[0] = num_hints - 1;
    for (Py_ssize_t index = 0; index < num_given; index++) {
        into[index + 1] = PyLong_AsSsize_t(PyTuple_GetItem(from, index));
        if (PyErr_Occurred()) return -1;
    }
    return (int)num_given + 1;
}

static PyObject *depths_in(const Table *table, PyObject *hints, PyObject *asked, PyObject *guess_tuple) {
    Py_buffer chain;
    Py_ssize_t guesses[MOST_TRIED];
    Set members = {{0}};
    if (!read_members(asked, table->num_words, &members) || !open_numbers(hints, PyBUF_STRIDED_RO, &chain)) return NULL;
    if (chain.shape[0] == 0) {
        PyBuffer_Release(&chain);
        return PyErr_Format(PyExc_ValueError, "a chain of no hints");
    }
    PyObject *found = PyList_New(0);
    int num_guesses = read_guesses(guess_tuple, chain.shape[0], guesses);
    if (found != NULL && (num_guesses < 0 || !find_depths(found, table, &chain, &members, guesses, num_guesses)))
        Py_CLEAR(found);
    PyBuffer_Release(&chain);
    return found;
}

static PyObject *depths(PyObject *module, PyObject *args) {
    (void)module;
    Table table;
    PyObject *hints, *members, *guesses, *keys, *words;
    if (!PyArg_ParseTuple(
            args, "OO!O!(KKiKKK)KOO!", &hints, &PyLong_Type, &members, &PyTuple_Type, &guesses, &table.prime,
            &table.factor, &table.bits, &table.high, &table.low, &table.num_segments, &table.empty, &keys,
            &PyTuple_Type, &words
        ) ||
        !open_table(keys, words, PyBUF_STRIDED_RO, &table))
        return NULL;
    PyObject *found = depths_in(&table, hints, members, guesses);
    close_table(&table);
    return found;
}

static PyMethodDef METHODS[] = {
    {"depths", depths, METH_VARARGS, "depths(chain, members, guesses, hashing, empty, keys, words): of each group."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.native.depths", "How deep chains are held.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_depths(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && (PyModule_AddIntMacro(module, MOST_WORDS) < 0 || PyModule_AddIntMacro(module, MOST_GUESSES) < 0))
        Py_CLEAR(module);
    return module;
}
