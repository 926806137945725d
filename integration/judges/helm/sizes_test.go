package helm

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// TestSizes checks that the pods of every size request the resources in the chart's README.
func TestSizes(t *testing.T) {
	for _, size := range []struct {
		name, values string
		cpu, memory  float64 // cores, GiB
		disk         float64 // GiB
	}{{"default", "", 0.5, 0.5, 10}, {"cluster", clusterValues(t), 4.5, 6, 60}} {
		_, all := rendered(t, size.values)
		var cpu, memory, disk float64
		for _, o := range all {
			replicas, ok := at(o, "spec", "replicas").(int)
			if !ok {
				continue
			}
			n := float64(replicas)
			for _, c := range containersOf(at(o, "spec", "template", "spec")) {
				cpu += n * quantity(t, at(c, "resources", "requests", "cpu"))
				memory += n * quantity(t, at(c, "resources", "requests", "memory"))
			}
			claims, _ := at(o, "spec", "volumeClaimTemplates").([]any)
			for _, claim := range claims {
				disk += n * quantity(t, at(claim, "spec", "resources", "requests", "storage"))
			}
		}
		if cpu != size.cpu || memory != size.memory || disk != size.disk {
			t.Errorf("%s requests %v CPUs, %v GiB of memory and %v GiB of disk, not %v, %v and %v", size.name, cpu, memory,
				disk, size.cpu, size.memory, size.disk)
		}
	}
}

// quantity returns a number of cores, or of GiB.
func quantity(t *testing.T, v any) float64 {
	t.Helper()
	text := fmt.Sprint(v)
	for unit, factor := range map[string]float64{"m": 1e-3, "Mi": 1.0 / 1024, "Gi": 1} {
		if digits, ok := strings.CutSuffix(text, unit); ok {
			return number(t, digits) * factor
		}
	}
	return number(t, text)
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
