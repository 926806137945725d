// Package packaging builds kvatlas as those who install it get it, and runs what comes out, and has systemd check the
// units of deploy/systemd. Build tag judges, as it compiles everything anew; it needs Go, git and systemd-analyze. See
// `make judges`.
package packaging
