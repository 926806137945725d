// Package packaging builds kvatlas as those who install it get it, and runs what comes out. Build tag judges, as it
// compiles everything anew; it needs nothing but Go and git. See `make judges`.
package packaging
