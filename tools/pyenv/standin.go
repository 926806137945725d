package pyenv

import (
	"context"
	"debug/elf"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// cudaPrefixes are the CUDA libraries that a stand-in does for, and what the names of each one's functions begin with.
// torch loads them when it is imported, and calls none of them where there is no GPU.
var cudaPrefixes = map[string][]string{
	"libcublas":       {"cublas"},
	"libcublasLt":     {"cublasLt"},
	"libcudnn":        {"cudnn"},
	"libcufft":        {"cufft"},
	"libcufile":       {"cuFile"},
	"libcurand":       {"curand"},
	"libcusolver":     {"cusolver"},
	"libcusparse":     {"cusparse"},
	"libcusparseLt":   {"cusparseLt"},
	"libnccl":         {"nccl", "pnccl"},
	"libnvJitLink":    {"nvJitLink"},
	"libnvrtc":        {"nvrtc"},
	"libnvshmem_host": {"nvshmem"},
}

// cudaReal are the CUDA libraries that are called when torch is imported: their packages are in the environment.
var cudaReal = []string{"libcudart.so.*", "libcupti.so.*"}

// standIn makes a torch that was built for CUDA loadable without CUDA's libraries. Each that torch's own libraries need
// becomes a small one in torch's folder, whose functions all return 1, which to their callers is an error.
func standIn(ctx context.Context, progress io.Writer, packages string) error {
	dir := filepath.Join(packages, "torch", "lib")
	if err := linkReal(packages, dir); err != nil {
		return err
	}
	own, err := filepath.Glob(filepath.Join(dir, "*.so*"))
	if err != nil {
		return err
	}
	n, err := readNeeds(own)
	if err != nil {
		return err
	}
	for _, library := range slices.Sorted(maps.Keys(n.libraries)) {
		stem, _, _ := strings.Cut(library, ".so")
		if cudaPrefixes[stem] == nil || exists(filepath.Join(dir, library)) {
			continue
		}
		functions := n.functionsOf(stem)
		fmt.Fprintf(progress, "stand-in for %s: %d functions\n", library, len(functions))
		if err := compileStandIn(ctx, filepath.Join(dir, library), functions); err != nil {
			return err
		}
	}
	return nil
}

// linkReal puts the real CUDA libraries where torch's own find them.
func linkReal(packages, dir string) error {
	for _, pattern := range cudaReal {
		// Their packages have them at nvidia/cu13/lib, earlier ones at nvidia/cuda_runtime/lib.
		found, err := filepath.Glob(filepath.Join(packages, "nvidia", "*", "lib", pattern))
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("%s is not there", pattern)
		}
		for _, f := range found {
			target, err := filepath.Rel(dir, f)
			if err != nil {
				return err
			}
			if err := os.Symlink(target, filepath.Join(dir, filepath.Base(f))); err != nil {
				return err
			}
		}
	}
	return nil
}

// needs are what libraries want of others.
type needs struct {
	libraries map[string]bool   // by their names
	functions map[string]string // and the version that is wanted of each, or ""
}

// readNeeds reads what libraries want that none of them has.
func readNeeds(paths []string) (needs, error) {
	n := needs{map[string]bool{}, map[string]string{}}
	has := map[string]bool{}
	for _, path := range paths {
		f, err := elf.Open(path)
		if err != nil {
			return n, fmt.Errorf("%s: %w", path, err)
		}
		libraries, err := f.ImportedLibraries()
		if err != nil {
			return n, fmt.Errorf("%s: %w", path, err)
		}
		symbols, err := f.DynamicSymbols()
		if err != nil {
			return n, fmt.Errorf("%s: %w", path, err)
		}
		f.Close()
		for _, l := range libraries {
			n.libraries[l] = true
		}
		for _, s := range symbols {
			if s.Section != elf.SHN_UNDEF {
				has[s.Name] = true
			} else if n.functions[s.Name] == "" {
				n.functions[s.Name] = s.Version
			}
		}
	}
	maps.DeleteFunc(n.functions, func(name, _ string) bool { return has[name] })
	return n, nil
}

// functionsOf are the functions that are wanted of a library, with their versions. Where the prefix of one library
// begins that of another, as cublas and cublasLt, a function belongs to the longer one.
func (n needs) functionsOf(stem string) map[string]string {
	longestMatch := func(name string) (owner string) {
		longest := 0
		for library, prefixes := range cudaPrefixes {
			for _, p := range prefixes {
				if strings.HasPrefix(name, p) && len(p) > longest {
					owner, longest = library, len(p)
				}
			}
		}
		return owner
	}
	functions := map[string]string{}
	for name, version := range n.functions {
		if longestMatch(name) == stem {
			functions[name] = version
		}
	}
	return functions
}

// compileStandIn compiles a library whose functions, each with its version, return 1.
func compileStandIn(ctx context.Context, path string, functions map[string]string) error {
	tmp, err := os.MkdirTemp("", "kvatlas-standin-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	var code, script strings.Builder
	versions := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(functions)) {
		fmt.Fprintf(&code, "int %s(void) { return 1; }\n", name)
		versions[functions[name]] = append(versions[functions[name]], name)
	}
	delete(versions, "")
	for _, v := range slices.Sorted(maps.Keys(versions)) {
		fmt.Fprintf(&script, "%s { global: %s; };\n", v, strings.Join(versions[v], "; "))
	}
	source, list := filepath.Join(tmp, "standin.c"), filepath.Join(tmp, "versions")
	if err := os.WriteFile(source, []byte(code.String()), 0o644); err != nil {
		return err
	}
	args := []string{"-shared", "-fPIC", "-w", "-Wl,-soname," + filepath.Base(path), "-o", path, source}
	if len(versions) > 0 {
		if err := os.WriteFile(list, []byte(script.String()), 0o644); err != nil {
			return err
		}
		args = append(args, "-Wl,--version-script="+list)
	}
	if _, err := run(ctx, "gcc", args...); err != nil {
		return fmt.Errorf("gcc (on Debian: apt-get install gcc): %w", err)
	}
	return nil
}
