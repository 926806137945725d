// Package packaging builds kvatlas as those who install it get it, from a module proxy and from the archive of a
// release, and runs what comes out. It has systemd check the units of deploy/systemd, and CycloneDX's schema the bill
// of materials. Build tag judges, as it compiles everything anew; it needs Go, git and systemd-analyze. See
// `make judges`.
package packaging
