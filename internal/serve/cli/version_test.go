package cli

import (
	"runtime/debug"
	"testing"
)

// TestVersionOfABuild covers the reported version for each way to build.
func TestVersionOfABuild(t *testing.T) {
	t.Parallel()
	const revision = "0123456789abcdef0123456789abcdef01234567"
	vcs := func(modified string) []debug.BuildSetting {
		return []debug.BuildSetting{{Key: "vcs.revision", Value: revision}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"},
			{Key: "vcs.modified", Value: modified}}
	}
	for _, c := range []struct {
		name, module string
		settings     []debug.BuildSetting
		want         string
	}{
		{"go install of a release", "v9.8.7", nil, "v9.8.7, go1"},
		{"go install of a release candidate", "v9.8.7-rc.1", nil, "v9.8.7-rc.1, go1"},
		{"go install of a commit", "v9.8.7-0.20260102030405-0123456789ab", nil, development + ", commit 0123456789ab, go1"},
		{"go install of a commit after a candidate", "v9.8.7-rc.1.0.20260102030405-0123456789ab", nil,
			development + ", commit 0123456789ab, go1"},
		{"go build at a tag", "v9.8.7", vcs("false"), "v9.8.7, commit 0123456789ab, go1"},
		{"go build beside a tag", "v9.8.7+dirty", vcs("true"), development + ", commit 0123456789ab, modified, go1"},
		{"go build where nothing is tagged", "v0.0.0-20260102030405-0123456789ab+dirty", vcs("true"),
			development + ", commit 0123456789ab, modified, go1"},
		{"go build -buildvcs=false", "(devel)", nil, development + ", go1"},
		{"go test", "", nil, development + ", go1"},
	} {
		b := readBuild(&debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Version: c.module}, Settings: c.settings})
		if b.String() != c.want {
			t.Errorf("%s: %q, want %q", c.name, b, c.want)
		}
		if wantTime := "2026-01-02T03:04:05Z"; b.Commit != "" && b.Time != wantTime {
			t.Errorf("%s: the commit is of %q, want %q", c.name, b.Time, wantTime)
		}
	}
}

// TestDevelopment checks that development builds are named after the minor release after the last one.
func TestDevelopment(t *testing.T) {
	t.Parallel()
	for release, want := range map[string]string{"v0.5.0": "v0.6.0", "v0.5.3": "v0.6.0", "v1.9.0": "v1.10.0"} {
		if got := nextMinor(release); got != want {
			t.Errorf("after %s comes %s, want %s", release, got, want)
		}
	}
	if Version() != nextMinor(Release)+"-dev" { // a test is never a release
		t.Errorf("the version of a test is %s", Version())
	}
}
