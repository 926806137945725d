package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"runtime/debug"
	"slices"
	"testing"
	"time"
)

var made = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// TestPack checks that an archive has the files in order, with owner root and the commit's time, and that the bytes are
// reproducible.
func TestPack(t *testing.T) {
	files := contents{"b/x": {[]byte("x"), 0o755}, "a": {[]byte("text"), 0o644}}
	packed, err := pack("folder", files, made)
	if err != nil {
		t.Fatal(err)
	}
	again, err := pack("folder", files, made.In(time.FixedZone("elsewhere", 3600)))
	if err != nil || !bytes.Equal(packed, again) {
		t.Errorf("a second archive differs: %v", err)
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if names = append(names, h.Name); !h.ModTime.Equal(made) || h.Uid != 0 || h.Uname != "root" {
			t.Errorf("%+v", h)
		}
	}
	if !slices.Equal(names, []string{"folder/a", "folder/b/x"}) {
		t.Errorf("the archive has %q", names)
	}
}

// TestBillOfMaterials checks that every module is listed once with the hash of go.sum. Equal programs give equal bills,
// and different programs have different serial numbers.
func TestBillOfMaterials(t *testing.T) {
	one := &debug.BuildInfo{GoVersion: "go1.26.8", Main: debug.Module{Path: "example.org/ours"}, Deps: []*debug.Module{
		{Path: "example.org/b", Version: "v1.0.0+incompatible", Sum: "h1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="},
		{Path: "example.org/a", Version: "v0.1.0"}}}
	two := &debug.BuildInfo{GoVersion: "go1.26.8", Main: debug.Module{Path: "example.org/c", Version: "v2.0.0"},
		Deps: []*debug.Module{{Path: "example.org/a", Version: "v0.1.0"}}}
	bill := billOfMaterials("v1.2.3", "linux/amd64", made, []*debug.BuildInfo{one, two})
	if !bytes.Equal(bill, billOfMaterials("v1.2.3", "linux/amd64", made, []*debug.BuildInfo{one, two})) {
		t.Error("a second bill differs")
	}
	var d, other document
	if err := json.Unmarshal(bill, &d); err != nil {
		t.Fatal(err)
	}
	var refs []string
	for _, c := range d.Components {
		refs = append(refs, c.PURL)
	}
	if want := []string{"pkg:golang/example.org/a@v0.1.0", "pkg:golang/example.org/b@v1.0.0%2Bincompatible",
		"pkg:golang/example.org/c@v2.0.0", "pkg:golang/std@1.26.8"}; !slices.Equal(refs, want) ||
		!slices.Equal(d.Dependencies[0].DependsOn, want) {
		t.Errorf("the bill has %q", refs)
	}
	if h := d.Components[1].Hashes; len(h) != 1 ||
		h[0].Content != "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f" {
		t.Errorf("the hash is %v", h)
	}
	if d.Metadata.Component.PURL != "pkg:golang/example.org/ours@v1.2.3" ||
		d.Metadata.Timestamp != "2026-01-02T03:04:05Z" {
		t.Errorf("the bill is of %+v", d.Metadata)
	}
	if err := json.Unmarshal(billOfMaterials("v1.2.3", "linux/arm64", made, []*debug.BuildInfo{one, two}),
		&other); err != nil || other.SerialNumber == d.SerialNumber {
		t.Errorf("two bills have the number %s, %v", d.SerialNumber, err)
	}
}

// TestVersion checks that a release has the tag as version, and another build has the commit.
func TestVersion(t *testing.T) {
	c := commit{revision: "0123456789abcdef"}
	for module, want := range map[string]string{"v9.8.7": "v9.8.7", "v9.8.7-rc.1": "v9.8.7-rc.1"} {
		if is := c.version(module); is != want {
			t.Errorf("%s is called %s", module, is)
		}
	}
	for _, module := range []string{"(devel)", "v9.8.7-0.20260102030405-0123456789ab", "v9.8.7+dirty"} {
		if is := c.version(module); len(is) < 14 || is[len(is)-13:] != "-0123456789ab" {
			t.Errorf("%s is called %s", module, is)
		}
	}
	if c.modified = true; c.version("(devel)")[len(c.version("(devel)"))-9:] != "-modified" {
		t.Errorf("a modified commit has the version %s", c.version("(devel)"))
	}
}
