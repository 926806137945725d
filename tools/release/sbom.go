package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// The types are the used part of CycloneDX 1.6, see cyclonedx.org/docs/1.6/json.
type (
	document struct {
		Schema       string       `json:"$schema"`
		Format       string       `json:"bomFormat"`
		SpecVersion  string       `json:"specVersion"`
		SerialNumber string       `json:"serialNumber,omitempty"`
		Version      int          `json:"version"`
		Metadata     metadata     `json:"metadata"`
		Components   []component  `json:"components"`
		Dependencies []dependency `json:"dependencies"`
	}
	metadata struct {
		Timestamp  string     `json:"timestamp"`
		Component  component  `json:"component"`
		Properties []property `json:"properties"`
	}
	component struct {
		Type     string    `json:"type"`
		Ref      string    `json:"bom-ref"`
		Name     string    `json:"name"`
		Version  string    `json:"version"`
		Hashes   []digest  `json:"hashes,omitempty"`
		Licenses []license `json:"licenses,omitempty"`
		PURL     string    `json:"purl"`
	}
	digest struct {
		Algorithm string `json:"alg"`
		Content   string `json:"content"`
	}
	license struct {
		License struct {
			ID string `json:"id"`
		} `json:"license"`
	}
	property struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	dependency struct {
		Ref       string   `json:"ref"`
		DependsOn []string `json:"dependsOn"`
	}
)

// billOfMaterials lists the modules in the programs from the toolchain's data. The hash of a module is the hash in
// go.sum (h1) over the module's files.
func billOfMaterials(version, platform string, when time.Time, programs []*debug.BuildInfo) []byte {
	modules := map[string]component{}
	add := func(path, version, sum string) {
		c := library(path, version)
		if raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(sum, "h1:")); err == nil && len(raw) > 0 {
			c.Hashes = []digest{{"SHA-256", hex.EncodeToString(raw)}}
		}
		modules[c.Ref] = c
	}
	for _, info := range programs {
		add("std", strings.TrimPrefix(info.GoVersion, "go"), "")
		if info.Main.Path != programs[0].Main.Path && info.Main.Path != "" { // a program of another module
			add(info.Main.Path, info.Main.Version, info.Main.Sum)
		}
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			add(m.Path, m.Version, m.Sum)
		}
	}
	ours := library(programs[0].Main.Path, version)
	ours.Type = "application"
	ours.Licenses = make([]license, 1)
	ours.Licenses[0].License.ID = "Apache-2.0"
	d := document{
		Schema: "http://cyclonedx.org/schema/bom-1.6.schema.json", Format: "CycloneDX", SpecVersion: "1.6", Version: 1,
		Metadata: metadata{when.UTC().Format(time.RFC3339), ours, []property{{"kvatlas:platform", platform}}},
	}
	for _, c := range modules {
		d.Components = append(d.Components, c)
	}
	slices.SortFunc(d.Components, func(a, b component) int { return cmp.Compare(a.Ref, b.Ref) })
	all := dependency{Ref: ours.Ref}
	for _, c := range d.Components {
		all.DependsOn = append(all.DependsOn, c.Ref)
	}
	d.Dependencies = []dependency{all}
	unnumbered := sha256.Sum256(encode(d))
	id := unnumbered[:16]
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80 // a UUID of version 8, made of the content of the bill
	d.SerialNumber = fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	return encode(d)
}

func library(path, version string) component {
	// the version in a package URL has no +
	purl := "pkg:golang/" + path + "@" + strings.ReplaceAll(url.PathEscape(version), "+", "%2B")
	return component{Type: "library", Ref: purl, Name: path, Version: version, PURL: purl}
}

func encode(d document) []byte {
	b, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		panic(err) // strings and numbers
	}
	return append(b, '\n')
}
