// Package hooks fills in what a caller leaves out of a struct of callbacks, so that whoever calls them need not ask
// which are set.
package hooks

import "reflect"

// Fill gives each field of a struct that is a nil function one that does nothing and returns zero values. hooks points
// to the struct; its other fields stay as they are. It panics if a function's field is not exported.
func Fill(hooks any) {
	fields := reflect.ValueOf(hooks).Elem()
	for i := range fields.NumField() {
		f := fields.Field(i)
		if f.Kind() != reflect.Func || !f.IsNil() {
			continue
		}
		var results []reflect.Value
		for i := range f.Type().NumOut() {
			results = append(results, reflect.Zero(f.Type().Out(i)))
		}
		f.Set(reflect.MakeFunc(f.Type(), func([]reflect.Value) []reflect.Value { return results }))
	}
}
