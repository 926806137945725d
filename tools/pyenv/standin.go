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

// cudaPrefixes are the CUDA libraries with a stand-in, and the prefixes of their functions. torch loads the libraries
// during import, but does not call them without a GPU.
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

// cudaReal are the CUDA libraries that torch calls during import. The environment contains their packages.
var cudaReal = []string{"libcudart.so.*", "libcupti.so.*"}

// standIn makes a CUDA build of torch loadable without CUDA's libraries. Every missing library is replaced by a small
// library in torch's folder. All of its functions return 1, an error code.
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

// linkReal links the real CUDA libraries into the search path of torch's libraries.
func linkReal(packages, dir string) error {
	for _, pattern := range cudaReal {
		// The packages have the libraries at nvidia/cu13/lib, earlier packages at nvidia/cuda_runtime/lib.
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

// needs are the required libraries and functions of other libraries.
type needs struct {
	libraries map[string]bool   // by name
	functions map[string]string // with the required version of every function, or ""
}

// readNeeds returns the needs of libraries that no library in paths provides.
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

// functionsOf returns the required functions of a library, with versions. If several prefixes match, as cublas and
// cublasLt, a function belongs to the longest prefix.
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

// compileStandIn compiles a library with functions that return 1. Every function has a version.
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
