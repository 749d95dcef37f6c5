// Needs more memory than its first attempt has: the guest's kernel kills it, and the second attempt has more.
process eat {
    clusterOptions '--vhpc-image=debian-minimal'
    memory { 900.MB * task.attempt }
    errorStrategy { task.exitStatus == 137 ? 'retry' : 'terminate' }
    maxRetries 2

    output: path 'fed.txt'

    script:
    """
    python3 -c 'held = [bytearray(b"x") * (1 << 20) for _ in range(700)]'
    echo $task.attempt \$VHPC_MEM_MB \$SLURM_JOB_ID > fed.txt
    """
}

workflow {
    eat | collectFile(name: 'fed.txt', storeDir: '.')
}
