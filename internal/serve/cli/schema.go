package cli

import (
	"encoding"
	"encoding/json"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// jsonSchema is the annotation of a command with --json: the form of the output.
const jsonSchema = "kvatlas_json"

// JSONFlag returns the row of --json.
func JSONFlag(to *bool) Flag {
	return Var(to, "json", false, "print JSON for programs instead of a table or lines")
}

// Output records the type of a command's JSON output, for the manual page and docs/reference.md.
func Output[T any](cmd *cobra.Command) *cobra.Command {
	return OutputForm(cmd, schemaOf(reflect.TypeFor[T](), nil))
}

// OutputForm records the form of a command's JSON output, for an output without a type.
func OutputForm(cmd *cobra.Command, form string) *cobra.Command {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[jsonSchema] = form
	return cmd
}

// apiNames are the prefixes of names in openapi.json, by package.
var apiNames = map[string]string{"api": "", "routing": "Routing"}

// unpublished are types of package api without a schema in openapi.json, since no operation returns them.
var unpublished = []string{"GenerationList", "GenerationInfo", "BadChunk"}

var (
	timeType   = reflect.TypeFor[time.Time]()
	textType   = reflect.TypeFor[encoding.TextMarshaler]()
	customType = reflect.TypeFor[json.Marshaler]()
)

// schemaOf returns the form of a value in JSON: {name: TYPE, ...} for an object, [TYPE] for a list, {*: TYPE} for a
// map, NAME for a schema of openapi.json. A field with ? may be absent. inside are the types around the value.
func schemaOf(t reflect.Type, inside []reflect.Type) string {
	switch {
	case t.Kind() == reflect.Pointer:
		return schemaOf(t.Elem(), inside)
	case t == timeType:
		return "time"
	case t.Implements(textType) || reflect.PointerTo(t).Implements(textType):
		return "string"
	}
	prefix, is := apiNames[path.Base(t.PkgPath())]
	if is && t.Kind() == reflect.Struct && !slices.Contains(unpublished, t.Name()) {
		return prefix + t.Name()
	}
	if t.Implements(customType) || reflect.PointerTo(t).Implements(customType) || slices.Contains(inside, t) {
		return "value"
	}
	switch t.Kind() {
	case reflect.Struct:
		return "{" + strings.Join(fieldsOf(t, append(slices.Clone(inside), t)), ", ") + "}"
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return "string"
		}
		return "[" + schemaOf(t.Elem(), inside) + "]"
	case reflect.Map:
		return "{*: " + schemaOf(t.Elem(), inside) + "}"
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "bool"
	case reflect.Interface:
		return "value"
	}
	return "number"
}

// fieldsOf returns the fields of an object, with the fields of embedded objects.
func fieldsOf(t reflect.Type, inside []reflect.Type) (list []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if f.Anonymous && name == "" && inner.Kind() == reflect.Struct {
			list = append(list, fieldsOf(inner, inside)...)
			continue
		}
		if !f.IsExported() || name == "-" {
			continue
		}
		if name == "" {
			name = f.Name
		}
		if strings.Contains(options, "omit") {
			name += "?"
		}
		list = append(list, fmt.Sprintf("%s: %s", name, schemaOf(f.Type, inside)))
	}
	return list
}
