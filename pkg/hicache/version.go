package hicache

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// version is an engine's release: major, minor and patch, without suffixes such as .post1, rc2 or +cpu.
type version [3]int

// parseVersion parses a release such as 0.5.23 or v0.5.5.post3.
func parseVersion(text string) (v version, err error) {
	rest := strings.TrimPrefix(text, "v")
	for i := range v {
		digits := 0
		for digits < len(rest) && '0' <= rest[digits] && rest[digits] <= '9' {
			digits++
		}
		if v[i], err = strconv.Atoi(rest[:digits]); err != nil {
			return version{}, fmt.Errorf("engine_version %.40q is not a release such as 0.5.23", text)
		}
		rest = rest[digits:]
		if i < len(v)-1 && !strings.HasPrefix(rest, ".") {
			return version{}, fmt.Errorf("engine_version %.40q is not a release such as 0.5.23", text)
		}
		if i < len(v)-1 {
			rest = rest[1:]
		}
	}
	return v, nil
}

// since reports whether a release is first or later. An unknown or invalid release returns false.
func since(text string, first version) bool {
	v, err := parseVersion(text)
	return err == nil && cmp.Or(cmp.Compare(v[0], first[0]), cmp.Compare(v[1], first[1]),
		cmp.Compare(v[2], first[2])) >= 0
}
