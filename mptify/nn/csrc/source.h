// Which sources a library was built from: a digest that nn/build.py computes and compares.
#pragma once

#ifndef MPTIFY_SOURCE
#define MPTIFY_SOURCE ""
#endif

extern "C" const char* mptify_source() { return MPTIFY_SOURCE; }
