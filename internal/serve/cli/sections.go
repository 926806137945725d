package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// inSection is the annotation of a flag with a section: the position and the title.
const inSection = "kvatlas_section"

// Section is a part of the flags in the help of a command.
type Section struct {
	Title string
	Names []string // flags; "nats-*" stands for all flags with the prefix
}

// Names returns the names of the flags, without old names.
func (t Flags) Names() (names []string) {
	for _, row := range t {
		if row.name != "" {
			names = append(names, row.name)
		}
	}
	return names
}

// Sections divides the flags in the help of a command into sections. A flag belongs to the first section with its name.
// Other flags follow in a last section.
func Sections(flags *pflag.FlagSet, list ...Section) {
	for i, s := range list {
		at := fmt.Sprintf("%02d", i)
		for _, name := range s.Names {
			prefix, many := strings.CutSuffix(name, "*")
			found := false
			flags.VisitAll(func(f *pflag.Flag) {
				if f.Name == name || many && strings.HasPrefix(f.Name, prefix) {
					found = true
					if f.Annotations[inSection] == nil {
						_ = flags.SetAnnotation(f.Name, inSection, []string{at, s.Title}) // the flag exists
					}
				}
			})
			if !found {
				panic(fmt.Sprintf("the section %q has the unknown flag --%s", s.Title, name))
			}
		}
	}
}

// section is a set of flags under a title.
type section struct {
	title string
	flags *pflag.FlagSet
}

// sectionsOf divides flags into their sections, in order. rest is the title of flags without sections; beside sections,
// these flags are further flags.
func sectionsOf(flags *pflag.FlagSet, rest string) (list []section) {
	at := map[string]section{}
	others := section{rest, pflag.NewFlagSet("", pflag.ContinueOnError)}
	flags.VisitAll(func(f *pflag.Flag) {
		place := f.Annotations[inSection]
		if place == nil {
			others.flags.AddFlag(f)
			return
		}
		if at[place[0]].flags == nil {
			at[place[0]] = section{place[1], pflag.NewFlagSet("", pflag.ContinueOnError)}
		}
		at[place[0]].flags.AddFlag(f)
	})
	for _, i := range slices.Sorted(maps.Keys(at)) {
		list = append(list, at[i])
	}
	if len(list) > 0 {
		others.title = "Further flags"
	}
	return append(list, others)
}
