package server

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// object is a JSON object.
type object = map[string]any

// constant is a constant of a type in its wire form, with the comment.
type constant struct{ value, comment string }

// comments has the comments of types and fields, by package.Type and package.Type.Field, and the constants of types, by
// package.Type. named has the JSON names of fields by Go name, for Go names of two words or more; "": several, or a
// type.
type comments struct {
	said      map[string]string
	constants map[string][]constant
	named     map[string]string
}

// twoWords matches Go names that are not also English words.
var twoWords = regexp.MustCompile(`^[A-Z][a-z0-9]+[A-Z]`)

func readComments(t *testing.T, packages ...string) comments {
	c := comments{map[string]string{}, map[string][]constant{}, map[string]string{}}
	for _, pkg := range packages {
		files, err := filepath.Glob("../../../pkg/" + pkg + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			for _, decl := range file.Decls {
				if gen, is := decl.(*ast.GenDecl); is {
					for _, spec := range gen.Specs {
						c.add(t, pkg, gen.Doc, spec)
					}
				}
			}
		}
	}
	return c
}

func (c *comments) add(t *testing.T, pkg string, doc *ast.CommentGroup, spec ast.Spec) {
	switch spec := spec.(type) {
	case *ast.TypeSpec:
		name := pkg + "." + spec.Name.Name
		c.said[name], c.named[spec.Name.Name] = text(spec.Doc, doc), ""
		if s, is := spec.Type.(*ast.StructType); is {
			for _, field := range s.Fields.List {
				for _, id := range field.Names {
					c.said[name+"."+id.Name] = text(field.Doc, field.Comment)
					if field.Tag != nil {
						c.name(id.Name, field.Tag.Value)
					}
				}
			}
		}
	case *ast.ValueSpec:
		of, is := spec.Type.(*ast.Ident)
		if !is || len(spec.Values) != 1 {
			return
		}
		if literal, is := spec.Values[0].(*ast.BasicLit); is && literal.Kind == token.STRING {
			value, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			name := pkg + "." + of.Name
			c.constants[name] = append(c.constants[name], constant{value, text(spec.Doc, spec.Comment)})
		}
	}
}

// name adds the JSON name of a field with a tag.
func (c *comments) name(field, tag string) {
	name, _, _ := strings.Cut(reflect.StructTag(strings.Trim(tag, "`")).Get("json"), ",")
	if before, known := c.named[field]; known && before != name || name == "-" {
		name = ""
	}
	if twoWords.MatchString(field) {
		c.named[field] = name
	}
}

// worded returns a comment with JSON names in place of Go names, and with absent in place of nil.
func (c *comments) worded(said, absent string) string {
	said = regexp.MustCompile(`\b([A-Z]\w*\.)?([A-Z]\w*)\b`).ReplaceAllStringFunc(said, func(name string) string {
		_, field, within := strings.Cut(name, ".")
		if !within {
			field = name
		}
		return cmp.Or(c.named[field], name)
	})
	return regexp.MustCompile(`\bnil\b`).ReplaceAllString(said, absent)
}

// text returns the first comment that is not empty, as a single line.
func text(groups ...*ast.CommentGroup) string {
	for _, g := range groups {
		if said := strings.Join(strings.Fields(g.Text()), " "); said != "" {
			return said
		}
	}
	return ""
}

// field is a field of a struct in its wire form.
type field struct {
	name     string
	of       reflect.Type // the struct with the field, if embedded
	f        reflect.StructField
	optional bool // omitted if empty
}

// fieldsOf returns the fields of a struct, including embedded fields.
func fieldsOf(t reflect.Type) (list []field) {
	for f := range t.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			within := f.Type
			if within.Kind() == reflect.Pointer {
				within = within.Elem()
			}
			for _, inner := range fieldsOf(within) {
				inner.optional = inner.optional || f.Type.Kind() == reflect.Pointer
				list = append(list, inner)
			}
		case name != "-" && f.IsExported():
			list = append(list, field{name, t, f, strings.Contains(options, "omit")})
		}
	}
	return list
}

// schemas makes schemas of types.
type schemas struct {
	comments
	components object // by name
}

func full(t reflect.Type) string { return path.Base(t.PkgPath()) + "." + t.Name() }

// describe adds the comment of a field to the schema, with JSON names in place of Go names.
func (s *schemas) describe(schema object, f field) object {
	said := s.said[full(f.of)+"."+f.f.Name]
	for _, other := range fieldsOf(f.of) {
		said = regexp.MustCompile(`(^|[ (])`+other.f.Name+`\b`).ReplaceAllString(said, "${1}"+other.name)
	}
	if said != "" {
		absent := "absent"
		if !f.optional {
			absent = "null"
		}
		schema["description"] = s.worded(said, absent)
	}
	return schema
}

// answer returns the schema of a type in answers, which may have further fields in a later version.
func (s *schemas) answer(t reflect.Type) object {
	if values := s.constants[full(t)]; t.Kind() == reflect.String && values != nil {
		return object{"type": "string", "enum": valuesOf(values)}
	}
	switch {
	case t == reflect.TypeFor[time.Time]():
		return object{"type": "string", "format": "date-time"}
	case t == reflect.TypeFor[api.Tokens]():
		return object{"type": "array", "items": number(0, 1<<32-1)}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return s.answer(t.Elem())
	case reflect.Slice:
		return object{"type": "array", "items": s.answer(t.Elem())}
	case reflect.Array:
		return object{"type": "array", "items": s.answer(t.Elem()), "minItems": t.Len(), "maxItems": t.Len()}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": s.answer(t.Elem())}
	case reflect.Struct:
		return s.component(t)
	}
	return scalar(t)
}

// component is a reference to a struct's schema.
func (s *schemas) component(t reflect.Type) object {
	name := t.Name()
	if pkg := path.Base(t.PkgPath()); pkg != "api" {
		name = strings.ToUpper(pkg[:1]) + pkg[1:] + name
	}
	if s.components[name] == nil {
		schema, properties, required := object{"type": "object"}, object{}, []string{}
		s.components[name] = schema // a type may be a part of itself
		for _, f := range fieldsOf(t) {
			schema := s.answer(f.f.Type)
			if f.optional && !strings.Contains(f.f.Tag.Get("msgpack"), "omit") {
				schema = orNull(schema) // MessagePack has all values
			}
			pointer := f.f.Type.Kind() == reflect.Pointer && f.f.Type.Elem().Kind() != reflect.Struct
			if pointer && !f.optional {
				schema = orNull(schema)
			}
			properties[f.name] = s.describe(schema, f)
			if !f.optional {
				required = append(required, f.name)
			}
		}
		schema["properties"] = properties
		if len(required) > 0 {
			schema["required"] = required
		}
		if said := s.said[full(t)]; said != "" {
			schema["description"] = s.worded(said, "absent")
		}
	}
	return object{"$ref": "#/components/schemas/" + name}
}

// probe is a request with an object for the reader of an operation.
type probe struct {
	op   string
	with func(inner string) string
}

// takes returns the fields of an object that the reader of an operation accepts.
func (p probe) takes(t *testing.T) []string {
	handler := api.Handler{Indexer: struct{ api.Indexer }{}, Registrar: struct{ api.Registrar }{},
		Router: struct{ api.Router }{}, Funnels: struct{ api.Funnels }{}, Insights: struct{ api.Insights }{},
		Hots: struct{ api.Hots }{}}
	_, failure := handler.Handle(t.Context(), p.op, api.JSON, []byte(p.with(`{"no such field at all":1}`)))
	if failure == nil {
		t.Fatalf("%s accepts any field", p.op)
	}
	_, list, has := strings.Cut(failure.Message, "; there are ")
	if !has && !strings.HasSuffix(failure.Message, ": the object has no fields") {
		t.Fatalf("%s: %v", p.op, failure)
	}
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}

// request returns the schema of an object in a request, with exactly the fields that the reader accepts. Null is equal
// to an absent field.
func (s *schemas) request(t *testing.T, of reflect.Type, p probe, needs []string) object {
	properties, fields := object{}, fieldsOf(of)
	for _, name := range p.takes(t) {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		var schema object
		if i < 0 {
			schema = maps.Clone(alsoTaken[name])
			if schema == nil {
				t.Fatalf("%s accepts %s, but %v has no such field", p.op, name, of)
			}
		} else {
			schema = s.describe(s.value(t, fields[i], p), fields[i])
		}
		for _, key := range []string{name, of.Name() + "." + name} {
			maps.Copy(schema, limits[key])
		}
		if !slices.Contains(needs, name) {
			schema = orNull(schema)
		}
		properties[name] = schema
	}
	schema := object{"type": "object", "properties": properties, "additionalProperties": false}
	if said := s.said[full(of)]; said != "" {
		schema["description"] = s.worded(said, "absent")
	}
	if len(needs) > 0 {
		schema["required"] = needs
	}
	return schema
}

// value is the schema of a field in a request.
func (s *schemas) value(t *testing.T, f field, p probe) object {
	of := f.f.Type
	inner := func(before, after string) probe {
		return probe{p.op, func(inner string) string {
			return p.with(fmt.Sprintf(`{%q:%s%s%s}`, f.name, before, inner, after))
		}}
	}
	switch {
	case of == reflect.TypeFor[api.Value]() && f.name == "chat_template_kwargs":
		return object{"type": "object"}
	case of == reflect.TypeFor[api.Value]():
		return object{"type": "array", "items": object{}}
	case of == reflect.TypeFor[api.Hashes]():
		return object{"type": "array", "maxItems": api.MaxTokens, "items": object{"anyOf": []any{
			number(-1<<63, 1<<64-1), object{"type": "string", "pattern": `^-?(0|[1-9][0-9]{0,18})$`}}}}
	case f.of == reflect.TypeFor[events.MediaItem]() && f.name == "hash":
		return object{"anyOf": []any{number(0, 1<<64-1), object{"type": "string", "minLength": 1}}}
	case of == reflect.TypeFor[api.Tokens]():
		return object{"type": "array", "maxItems": api.MaxTokens, "items": number(0, 1<<32-1)}
	case of == reflect.TypeFor[events.StreamSeq](), f.name == "age_ms":
		return object{"anyOf": []any{
			number(0, 1<<64-1), object{"type": "string", "pattern": `^(0|[1-9][0-9]{0,18})$`}}}
	case of.Kind() == reflect.Pointer && of.Elem().Kind() == reflect.Struct:
		return s.request(t, of.Elem(), inner("", ""), needs[of.Elem().Name()])
	case of.Kind() == reflect.Slice && of.Elem().Kind() == reflect.Struct:
		return object{"type": "array", "items": s.request(t, of.Elem(), inner("[", "]"), needs[of.Elem().Name()])}
	}
	return s.answer(of)
}

// orNull returns a schema that also accepts null.
func orNull(schema object) object {
	schema = maps.Clone(schema)
	switch is := schema["type"].(type) {
	case string:
		schema["type"] = []string{is, "null"}
	default:
		schema["anyOf"] = append(slices.Clone(schema["anyOf"].([]any)), object{"type": "null"})
	}
	if enum, is := schema["enum"].([]any); is {
		schema["enum"] = append(slices.Clone(enum), nil)
	}
	return schema
}

func scalar(t reflect.Type) object {
	switch t.Kind() {
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Float64:
		return object{"type": "number"}
	case reflect.Uint32:
		return number(0, 1<<32-1)
	case reflect.Uint64:
		return number(0, 1<<64-1)
	case reflect.Int, reflect.Int64:
		return object{"type": "integer"}
	}
	panic(fmt.Sprint("no schema for ", t))
}

// number is the schema of whole numbers.
func number(least int64, most uint64) object {
	return object{"type": "integer", "minimum": least, "maximum": most}
}

func valuesOf(list []constant) (values []any) {
	for _, c := range list {
		values = append(values, c.value)
	}
	return values
}
