// What tells a library of one version from that of another.
#ifndef EVERSTEP_SOURCES
#define EVERSTEP_SOURCES "unknown"
#endif

const char *everstep_sources(void) { return EVERSTEP_SOURCES; }

// Looked for where the library is installed as an extension module; it is loaded by ctypes, never imported.
void *PyInit__native(void) { return 0; }
