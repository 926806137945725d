// Package packaging builds kvatlas as users install the programs, from a module proxy and from the archive of a
// release, and runs the results. systemd checks the units of deploy/systemd, and CycloneDX's schema checks the bill of
// materials. The tests compile all packages and therefore have the build tag judges. They need Go, git and
// systemd-analyze. See `make judges`.
package packaging
