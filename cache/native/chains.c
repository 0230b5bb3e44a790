/* Chains of block hashes, all blocks of a prompt in one call.
 *
 *     h_i = H(h_{i-1}, tokens_i)      h_{-1} = parent
 *
 * The rule is block_hash.py's, which makes the same hashes with xxhash and hashlib where this is not compiled: one call
 * for each block, and most of its time is the call's.
 *
 * Knows bytes; knows neither tokens nor fingerprints.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sha256.h"
#include "xxh3.h"

enum {
    HASH_BYTES = 16,
    MOST_BLOCK_BYTES = XXH3_MOST_BYTES - HASH_BYTES, /* larger blocks are few for each token */
    /* Beyond these, 131,072 and 8,192 tokens, other threads run meanwhile: a Router hashes such prompts on a thread. */
    XXH3_LONG_BYTES = 4 * 131072,
    SHA256_LONG_BYTES = 4 * 8192,
};

typedef void (*Digest)(const unsigned char *message, size_t size, unsigned char *into);

static Compression compression; /* the best one of this processor */

static void sha256_128(const unsigned char *message, size_t size, unsigned char *into) {
    sha256(compression, message, size, into);
}

static inline void hash_blocks(
    Digest digest, const Py_buffer *parent, const Py_buffer *tokens, size_t block_bytes, unsigned char *into
) {
    unsigned char message[HASH_BYTES + MOST_BLOCK_BYTES];
    const unsigned char *block = tokens->buf, *end = block + tokens->len;
    memcpy(message, parent->buf, HASH_BYTES);
    for (; block < end; block += block_bytes, into += HASH_BYTES) {
        memcpy(message + HASH_BYTES, block, block_bytes);
        digest(message, HASH_BYTES + block_bytes, message); /* the next one's parent */
        memcpy(into, message, HASH_BYTES);
    }
}

static inline PyObject *chain_by(Digest digest, Py_ssize_t long_bytes, PyObject *args) {
    Py_ssize_t block_bytes;
    Py_buffer parent, tokens;
    if (!PyArg_ParseTuple(args, "ny*y*", &block_bytes, &parent, &tokens)) return NULL;
    PyObject *hashes = NULL;
    if (block_bytes < 1 || block_bytes > MOST_BLOCK_BYTES)
        PyErr_Format(PyExc_ValueError, "block_bytes = %zd: needs 1 to %d", block_bytes, MOST_BLOCK_BYTES);
    else if (parent.len != HASH_BYTES)
        PyErr_Format(PyExc_ValueError, "parent of %zd bytes: needs %d", parent.len, HASH_BYTES);
    else if (tokens.len % block_bytes)
        PyErr_Format(PyExc_ValueError, "tokens of %zd bytes: needs whole blocks of %zd", tokens.len, block_bytes);
    else if ((hashes = PyBytes_FromStringAndSize(NULL, tokens.len / block_bytes * HASH_BYTES)) != NULL) {
        unsigned char *into = (unsigned char *)PyBytes_AsString(hashes);
        PyThreadState *others = tokens.len > long_bytes ? PyEval_SaveThread() : NULL;
        hash_blocks(digest, &parent, &tokens, block_bytes, into);
        if (others != NULL) PyEval_RestoreThread(others);
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    return hashes;
}

static PyObject *xxh3_chain(PyObject *module, PyObject *args) {
    (void)module;
    return chain_by(xxh3_128, XXH3_LONG_BYTES, args);
}

static PyObject *sha256_chain(PyObject *module, PyObject *args) {
    (void)module;
    return chain_by(sha256_128, SHA256_LONG_BYTES, args);
}

static PyMethodDef METHODS[] = {
    {"xxh3_chain", xxh3_chain, METH_VARARGS, "xxh3_chain(block_bytes, parent, tokens): all hashes, joined."},
    {"sha256_chain", sha256_chain, METH_VARARGS, "sha256_chain(block_bytes, parent, tokens): all hashes, joined."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "cache.native.chains", "Chains of block hashes.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_chains(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && PyModule_AddIntConstant(module, "MOST_BLOCK_BYTES", MOST_BLOCK_BYTES) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    compression = best_compression();
    return module;
}
