#include "textflag.h"

DATA ·lanes<>+0(SB)/8, $0
DATA ·lanes<>+8(SB)/8, $1
DATA ·lanes<>+16(SB)/8, $2
DATA ·lanes<>+24(SB)/8, $3
GLOBL ·lanes<>(SB), RODATA|NOPTR, $32
DATA ·four<>+0(SB)/8, $4
GLOBL ·four<>(SB), RODATA|NOPTR, $8

// Registers: Y1 and Y2 have a bucket. Y10 and Y11 have the numbers of its slots, Y12 is zero. Y14 flips signs, to
// compare unsigned numbers. DI is the table, SI the number of buckets, DX the hashes, CX the number of hashes, R8 the
// values, R9 the current number, R15 the last number.
#define START \
	MOVQ slots+0(FP), DI \
	MOVQ size+8(FP), SI \
	SHRQ $3, SI \
	MOVQ hashes+16(FP), DX \
	MOVQ n+24(FP), CX \
	MOVQ refs+32(FP), R8 \
	XORQ R9, R9 \
	LEAQ -1(CX), R15 \
	VMOVDQU ·lanes<>(SB), Y10 \
	VPBROADCASTQ ·four<>(SB), Y11 \
	VPADDQ Y10, Y11, Y11 \
	VPXOR Y12, Y12, Y12 \
	VPCMPEQQ Y14, Y14, Y14 \
	VPSLLQ $63, Y14, Y14

// BITS converts the lanes of two vectors, all ones or zeros, to eight bits.
#define BITS(low, high, to, scratch) \
	VMOVMSKPD low, to \
	VMOVMSKPD high, scratch \
	SHLQ $4, scratch \
	ORQ scratch, to

// BUCKET sets R10 to the bucket of hash i. The hash stays in AX.
#define BUCKET(i) \
	MOVQ (DX)(i*8), AX \
	MOVQ AX, R10 \
	IMULQ SI, R10 \
	SHRQ $32, R10 \
	SHLQ $6, R10 \
	ADDQ DI, R10

// AHEAD prefetches the bucket of the hash 32 positions ahead, or of the last hash.
#define AHEAD \
	LEAQ 32(R9), AX \
	CMPQ AX, R15 \
	CMOVQGT R15, AX \
	BUCKET(AX) \
	PREFETCHT0 (R10)

// BEHIND prefetches the bucket after the bucket of the hash 16 positions ahead, or of the last hash, if the bucket is
// full.
#define BEHIND \
	LEAQ 16(R9), AX \
	CMPQ AX, R15 \
	CMOVQGT R15, AX \
	BUCKET(AX) \
	MOVQ 56(R10), R11 \
	NEGQ R11 \
	SBBQ R11, R11 \
	ANDQ $64, R11 \
	PREFETCHT0 (R10)(R11*1)

// LOAD reads the bucket at R10.
#define LOAD \
	VMOVDQU (R10), Y1 \
	VMOVDQU 32(R10), Y2

// PLACE sets R11 to the number of names in the bucket with a hash below the hash in AX. The lower half of AX is zero or
// belongs to the slot. R11 is the slot's place in the bucket, unless it is 8.
#define PLACE \
	VMOVQ AX, X0 \
	VPBROADCASTQ X0, Y0 \
	VPXOR Y14, Y0, Y3 \
	VPXOR Y14, Y1, Y4 \
	VPXOR Y14, Y2, Y5 \
	VPCMPGTQ Y4, Y3, Y4 \
	VPCMPGTQ Y5, Y3, Y5 \
	VPCMPEQQ Y12, Y1, Y6 \
	VPCMPEQQ Y12, Y2, Y7 \
	VPANDN Y4, Y6, Y4 \
	VPANDN Y5, Y7, Y5 \
	BITS(Y4, Y5, R11, R12) \
	NOTQ R11 \
	TZCNTQ R11, R11

// INSERT inserts the slot in Y0 at place R11 of the bucket. The slots from there on move, and the last is lost.
#define INSERT \
	VMOVQ R11, X3 \
	VPBROADCASTQ X3, Y3 \
	VPERM2I128 $0x21, Y2, Y1, Y4 \
	VPALIGNR $8, Y4, Y2, Y4 \
	VPERM2I128 $0x08, Y1, Y1, Y5 \
	VPALIGNR $8, Y5, Y1, Y5 \
	VPCMPGTQ Y3, Y10, Y6 \
	VPCMPGTQ Y3, Y11, Y7 \
	VPBLENDVB Y6, Y5, Y1, Y1 \
	VPBLENDVB Y7, Y4, Y2, Y2 \
	VPCMPEQQ Y3, Y10, Y6 \
	VPCMPEQQ Y3, Y11, Y7 \
	VPBLENDVB Y6, Y0, Y1, Y1 \
	VPBLENDVB Y7, Y0, Y2, Y2 \
	VMOVDQU Y1, (R10) \
	VMOVDQU Y2, 32(R10)

// DELETE deletes the slot at place R11 of the bucket. The slots after it move, and the last becomes empty.
#define DELETE \
	VMOVQ R11, X3 \
	VPBROADCASTQ X3, Y3 \
	VPERM2I128 $0x21, Y2, Y1, Y4 \
	VPALIGNR $8, Y1, Y4, Y4 \
	VPERM2I128 $0x81, Y2, Y2, Y5 \
	VPALIGNR $8, Y2, Y5, Y5 \
	VPCMPGTQ Y10, Y3, Y6 \
	VPCMPGTQ Y11, Y3, Y7 \
	VPBLENDVB Y6, Y1, Y4, Y1 \
	VPBLENDVB Y7, Y2, Y5, Y2 \
	VMOVDQU Y1, (R10) \
	VMOVDQU Y2, 32(R10)

// func findVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)
TEXT ·findVectors(SB), NOSPLIT, $0-48
	START
	XORQ R13, R13

find:
	CMPQ R9, CX
	JGE found
	AHEAD
	BUCKET(R9)
	SHLQ $32, AX
	LOAD
	PLACE
	CMPQ R11, $8
	JE found
	MOVQ (R10)(R11*8), BX
	XORQ BX, AX
	SHRQ $32, AX
	MOVQ R13, AX
	CMOVQEQ BX, AX // the hash is present, or the hash and the slot are zero
	MOVL AX, (R8)(R9*4)
	INCQ R9
	JMP find

found:
	MOVQ R9, done+40(FP)
	VZEROUPPER
	RET

// func enterVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)
TEXT ·enterVectors(SB), NOSPLIT, $0-48
	START

enter:
	CMPQ R9, CX
	JGE entered
	AHEAD
	BEHIND
	BUCKET(R9)
	SHLQ $32, AX
	LOAD
	PLACE
	CMPQ R11, $8
	JE beyond

place:
	MOVQ (R10)(R11*8), BX
	MOVQ BX, R12
	XORQ AX, R12
	SHRQ $32, R12
	JNE new
	TESTQ BX, BX
	JNE entered // the hash is present

new:
	MOVL (R8)(R9*4), BX
	ORQ BX, AX
	VMOVQ AX, X0
	VPBROADCASTQ X0, Y0
	MOVQ 56(R10), R12
	TESTQ R12, R12
	JNE full

put:
	INSERT
	INCQ R9
	JMP enter

full: // the last slot moves to the next bucket, and so on, if one of the next few has room
	MOVQ R10, R13
	LEAQ (6*64)(R10), BX

room:
	ADDQ $64, R13
	CMPQ R13, BX
	JA entered
	CMPQ 56(R13), $0
	JNE room

push:
	INSERT
	ADDQ $64, R10
	LOAD
	VMOVQ R12, X0
	VPBROADCASTQ X0, Y0
	XORQ R11, R11
	MOVQ 56(R10), R12
	TESTQ R12, R12
	JNE push
	JMP put

beyond: // all slots of a full bucket come before, so the slot goes to one of the next few
	MOVQ R10, R13
	LEAQ (6*64)(R10), BX

end:
	ADDQ $64, R13
	CMPQ R13, BX
	JA entered
	CMPQ 56(R13), $0
	JNE end

next:
	ADDQ $64, R10
	LOAD
	PLACE
	CMPQ R11, $8
	JE next
	JMP place

entered:
	MOVQ R9, done+40(FP)
	VZEROUPPER
	RET

// func removeVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)
TEXT ·removeVectors(SB), NOSPLIT, $0-48
	START

remove:
	CMPQ R9, CX
	JGE removed
	AHEAD
	BEHIND
	BUCKET(R9)
	SHLQ $32, AX
	MOVL (R8)(R9*4), BX
	ORQ BX, AX
	VMOVQ AX, X0
	VPBROADCASTQ X0, Y0
	LOAD

look:
	VPCMPEQQ Y1, Y0, Y3
	VPCMPEQQ Y2, Y0, Y4
	BITS(Y3, Y4, R11, R12)
	TZCNTQ R11, R11
	MOVQ 56(R10), R12
	CMPQ R11, $8
	JA further

check:
	TESTQ R12, R12
	JNE last

gone:
	DELETE
	INCQ R9
	JMP remove

further: // the slot is in the next bucket, because this one is full
	TESTQ R12, R12
	JEQ removed
	ADDQ $64, R10
	LOAD
	JMP look

last: // the first slot of the next bucket moves here, if this is its place
	MOVQ 64(R10), BX
	TESTQ BX, BX
	JEQ gone
	MOVQ BX, R13
	SHRQ $32, R13
	IMULQ SI, R13
	SHRQ $32, R13
	SHLQ $6, R13
	ADDQ DI, R13
	CMPQ R13, R10
	JA gone
	DELETE
	MOVQ BX, 56(R10)
	ADDQ $64, R10
	LOAD
	XORQ R11, R11
	MOVQ 56(R10), R12
	JMP check

removed:
	MOVQ R9, done+40(FP)
	VZEROUPPER
	RET
